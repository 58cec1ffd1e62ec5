package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/metadata"

	dualclaw "github.com/dualclaw/dualclaw-go"
	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
	"github.com/dualclaw/dualclaw-go/sse"
)

const (
	maxBody = 1 << 20
	claw    = "web"
)

// limits are the times a gateway gives its clients.
type limits struct {
	body     time.Duration // to send the body
	write    time.Duration // to read what was written
	shutdown time.Duration // to open streams, to end
}

var defaults = limits{body: 30 * time.Second, write: time.Minute, shutdown: 10 * time.Second}

// Reasons after which the same question may work if it is asked again.
var retryable = map[string]bool{
	"STORE_UNAVAILABLE": true, "OVERLOADED": true, "QUOTA_EXCEEDED": true, "CONVERSATION_BUSY": true, "SLOW_CLIENT": true,
}

// Hints of refusals that are the gateway's own; the engine's bring theirs.
var hints = map[string]string{
	"INVALID_REQUEST":   "Correct what is named and send it again.",
	"UNAUTHENTICATED":   "Send a key that the engine knows as bearer token.",
	"STORE_UNAVAILABLE": "Try again in a moment, a start with the same request_id.",
	"INTERNAL":          "Try again; if it stays, the engine's log says more.",
}

var errShutdown = &dualclaw.Error{Reason: "STORE_UNAVAILABLE", Message: "the gateway is shutting down; the run goes on"}

// serve answers on listener until ctx ends; then every open stream is told so and ended.
func serve(ctx context.Context, client *dualclaw.Client, listener net.Listener, times limits) error {
	routes := http.NewServeMux()
	routes.Handle("POST /messages/stream", &original{client, times})
	// An engine without keys trusts whoever calls, so neither another site's page may post here, nor one whose name
	// resolves to loopback.
	handler := http.NewCrossOriginProtection().Handler(routes)
	if address, ok := listener.Addr().(*net.TCPAddr); ok && address.IP.IsLoopback() {
		handler = loopbackHosts(handler)
	}
	streams, end := context.WithCancelCause(context.Background())
	defer end(nil)
	server := &http.Server{
		Handler:           handler,
		BaseContext:       func(net.Listener) context.Context { return streams },
		ReadHeaderTimeout: 10 * time.Second,
		WriteTimeout:      times.write, // a stream extends it with every write
		IdleTimeout:       2 * time.Minute,
	}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	end(errShutdown)
	// Serve returns at once; it is Shutdown that waits for the streams.
	ending, cancel := context.WithTimeout(context.Background(), times.shutdown)
	defer cancel()
	if err := server.Shutdown(ending); err != nil {
		return server.Close()
	}
	return nil
}

func loopbackHosts(next http.Handler) http.Handler {
	return http.HandlerFunc(func(response http.ResponseWriter, request *http.Request) {
		host := request.Host
		if name, _, err := net.SplitHostPort(host); err == nil {
			host = name
		}
		if ip := net.ParseIP(strings.Trim(host, "[]")); !strings.EqualFold(host, "localhost") && (ip == nil || !ip.IsLoopback()) {
			http.Error(response, "this host is not served here; call it localhost", http.StatusForbidden)
			return
		}
		next.ServeHTTP(response, request)
	})
}

// original is the original route: only frames go out, and whatever goes wrong is one error frame under status 200,
// because its front-ends look nowhere else.
type original struct {
	client *dualclaw.Client
	times  limits
}

func (o *original) ServeHTTP(response http.ResponseWriter, request *http.Request) {
	control := http.NewResponseController(response)
	body, status := o.readBody(control, response, request)
	if status != http.StatusOK {
		response.Header().Set("Connection", "close")
		http.Error(response, fmt.Sprintf("the body must be at most %d bytes and come whole within %s", maxBody, o.times.body), status)
		return
	}
	header := response.Header()
	header.Set("Content-Type", "text/event-stream")
	header.Set("Cache-Control", "no-cache, no-transform")
	header.Set("X-Accel-Buffering", "no")
	header.Set("X-Content-Type-Options", "nosniff")
	write := func(frames string) error {
		if err := control.SetWriteDeadline(time.Now().Add(o.times.write)); err != nil {
			return err
		}
		if _, err := io.WriteString(response, frames); err != nil {
			return err
		}
		return control.Flush()
	}
	if write("") != nil { // the head goes out at once
		return
	}
	err := o.relay(request, body, write)
	left := request.Context().Err() != nil && context.Cause(request.Context()) != errShutdown
	if err != nil && !left {
		frame, _ := dualclaw.OriginalFrame(failure(err))
		_ = write(frame)
	}
}

// readBody reads the body within its limits; another status than 200 says which it went beyond.
func (o *original) readBody(control *http.ResponseController, response http.ResponseWriter, request *http.Request) ([]byte, int) {
	if control.SetReadDeadline(time.Now().Add(o.times.body)) != nil {
		return nil, http.StatusInternalServerError
	}
	body, err := io.ReadAll(http.MaxBytesReader(response, request.Body, maxBody))
	var tooLarge *http.MaxBytesError
	switch {
	case errors.As(err, &tooLarge):
		return nil, http.StatusRequestEntityTooLarge
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, http.StatusRequestTimeout
	case err != nil:
		return nil, http.StatusBadRequest
	}
	// Without this the deadline would end the whole request: net/http goes on reading to notice a client that leaves.
	if control.SetReadDeadline(time.Time{}) != nil {
		return nil, http.StatusInternalServerError
	}
	return body, http.StatusOK
}

// relay streams a run's frames; the client that leaves ends the stream and not the run.
func (o *original) relay(request *http.Request, body []byte, write func(string) error) error {
	ctx := request.Context()
	if given := request.Header.Get("Authorization"); given != "" {
		token, ok := bearerToken(given)
		if !ok {
			return &dualclaw.Error{Reason: "UNAUTHENTICATED", Message: "the Authorization header must be 'Bearer <token>'"}
		}
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", "Bearer "+token)
	}
	run, err := readRequest(body)
	if err != nil {
		return err
	}
	stream, err := o.client.Run(ctx, run)
	if err != nil {
		return err
	}
	defer stream.Close()
	var encoder sse.Encoder
	for event, err := range stream.Events() {
		if err != nil {
			return err
		}
		if frames := encoder.Encode(event); frames != "" && write(frames) != nil {
			return nil // the client has left, or stopped reading
		}
	}
	return nil
}

func bearerToken(header string) (string, bool) {
	scheme, token, _ := strings.Cut(header, " ")
	token = strings.TrimSpace(token)
	strange := strings.IndexFunc(token, func(r rune) bool { return r < ' ' || r > '~' }) >= 0
	return token, strings.EqualFold(scheme, "bearer") && token != "" && !strange
}

// readRequest reads {"content": str, "conversation_id"?: str|int, "agent"?: str, "request_id"?: str}. Keys it does not
// know are ignored.
func readRequest(body []byte) (*v1.RunRequest, error) {
	fields, problem := readObject(body)
	if problem != "" {
		return nil, &dualclaw.Error{Reason: "INVALID_REQUEST", Message: "body: " + problem}
	}
	run := &v1.RunRequest{Claw: claw}
	var wrong []string
	content, ok := text(fields["content"])
	if !ok || content == "" {
		wrong = append(wrong, "content: must be a non-empty string")
	}
	run.Message = dualclaw.UserMessage(content)
	if run.ConversationId, ok = identity(fields["conversation_id"]); !ok {
		wrong = append(wrong, "conversation_id: must be a string or an integer")
	}
	if run.Agent, ok = text(fields["agent"]); !ok {
		wrong = append(wrong, "agent: must be a string")
	}
	if run.RequestId, ok = text(fields["request_id"]); !ok {
		wrong = append(wrong, "request_id: must be a string")
	}
	if len(wrong) > 0 {
		return nil, &dualclaw.Error{Reason: "INVALID_REQUEST", Message: strings.Join(wrong, "; ")}
	}
	return run, nil
}

// readObject reads one JSON object key by key: a struct would take "Content" for "content", and the last of two.
func readObject(body []byte) (map[string]json.RawMessage, string) {
	if !utf8.Valid(body) {
		return nil, "is not JSON: it is not UTF-8"
	}
	var whole json.RawMessage
	if err := json.Unmarshal(body, &whole); err != nil {
		return nil, "is not JSON: " + err.Error()
	}
	reader := json.NewDecoder(bytes.NewReader(whole))
	if opening, err := reader.Token(); err != nil || opening != json.Delim('{') {
		return nil, "must be one JSON object"
	}
	fields := map[string]json.RawMessage{}
	for reader.More() {
		key, err := reader.Token()
		if err != nil {
			return nil, "is not JSON: " + err.Error()
		}
		name, _ := key.(string)
		if _, known := fields[name]; known {
			return nil, "is not JSON: a key is given twice"
		}
		var value json.RawMessage
		if err := reader.Decode(&value); err != nil {
			return nil, "is not JSON: " + err.Error()
		}
		fields[name] = value
	}
	return fields, ""
}

// identity reads an id; integers, of any size, are what older front-ends use.
func identity(raw json.RawMessage) (string, bool) {
	switch digits := strings.TrimPrefix(string(raw), "-"); {
	case digits == "" || strings.Trim(digits, "0123456789") != "":
		return text(raw)
	case digits == "0":
		return "0", true // as "-0" reads
	}
	return string(raw), true
}

// text reads a string; one that is not there, or null, is empty.
func text(raw json.RawMessage) (string, bool) {
	if len(raw) == 0 {
		return "", true
	}
	var found string
	err := json.Unmarshal(raw, &found)
	return found, err == nil
}

// failure is the error event that tells a failure outside the run.
func failure(err error) *v1.EngineEvent {
	var refused *dualclaw.Error
	if !errors.As(err, &refused) {
		log.Printf("a stream failed: %v", err)
		refused = &dualclaw.Error{Reason: "INTERNAL", Message: "the gateway failed"}
	}
	message, hint := refused.Message, refused.Metadata["hint"]
	if refused.Unreachable {
		log.Print(message) // it has the engine's address, for which callers have no use
		message = "the gateway cannot reach its engine"
	}
	if hint == "" {
		hint = hints[refused.Reason]
	}
	return &v1.EngineEvent{Payload: &v1.EngineEvent_Error{Error: &v1.Error{
		Message: message,
		Diagnosis: &v1.Diagnosis{
			Code:      strings.Replace(strings.ToLower(refused.Reason), "_", ".", 1),
			Severity:  v1.Severity_SEVERITY_ERROR,
			Summary:   message,
			Hint:      hint,
			Retryable: refused.RetryAfter > 0 || retryable[refused.Reason],
		},
	}}}
}
