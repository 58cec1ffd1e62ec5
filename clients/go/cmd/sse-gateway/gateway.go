package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"

	"google.golang.org/grpc/metadata"

	dualclaw "github.com/dualclaw/dualclaw-go"
	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
	"github.com/dualclaw/dualclaw-go/sse"
)

const (
	maxBody = 1 << 20
	claw    = "web"
)

// Reasons after which the same question may work if it is asked again.
var retryable = map[string]bool{
	"STORE_UNAVAILABLE": true, "OVERLOADED": true, "QUOTA_EXCEEDED": true, "CONVERSATION_BUSY": true, "SLOW_CLIENT": true,
}

func newGateway(client *dualclaw.Client) http.Handler {
	routes := http.NewServeMux()
	routes.Handle("POST /messages/stream", &original{client})
	return routes
}

// original is the original route: only frames go out, and whatever goes wrong is one error frame under status 200,
// because its front-ends look nowhere else.
type original struct{ client *dualclaw.Client }

func (o *original) ServeHTTP(response http.ResponseWriter, request *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(response, request.Body, maxBody))
	if err != nil {
		http.Error(response, "the body is above 1 MiB or broke off", http.StatusRequestEntityTooLarge)
		return
	}
	header := response.Header()
	header.Set("Content-Type", "text/event-stream; charset=utf-8")
	header.Set("Cache-Control", "no-cache, no-transform")
	header.Set("X-Accel-Buffering", "no")
	response.WriteHeader(http.StatusOK)
	flusher := http.NewResponseController(response)
	_ = flusher.Flush()

	write := func(frames string) error {
		if frames == "" {
			return nil
		}
		if _, err := io.WriteString(response, frames); err != nil {
			return err
		}
		return flusher.Flush()
	}
	if err := o.relay(request, body, write); err != nil {
		frame, _ := dualclaw.OriginalFrame(failure(err))
		_ = write(frame)
	}
}

// relay streams a run's frames; the client that leaves ends the stream and not the run.
func (o *original) relay(request *http.Request, body []byte, write func(string) error) error {
	run, err := readRequest(body)
	if err != nil {
		return err
	}
	ctx := request.Context()
	if token := request.Header.Get("Authorization"); token != "" {
		ctx = metadata.AppendToOutgoingContext(ctx, "authorization", token)
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
		if err := write(encoder.Encode(event)); err != nil {
			return nil // the client has left
		}
	}
	return nil
}

// readRequest reads {"content": str, "conversation_id"?: str|int, "agent"?: str, "request_id"?: str}.
func readRequest(body []byte) (*v1.RunRequest, error) {
	var fields struct {
		Content        *string         `json:"content"`
		ConversationID json.RawMessage `json:"conversation_id"`
		Agent          *string         `json:"agent"`
		RequestID      *string         `json:"request_id"`
	}
	wrong := &dualclaw.Error{Reason: "INVALID_REQUEST"}
	if err := json.Unmarshal(body, &fields); err != nil {
		wrong.Message = "the body must be a JSON object with strings: " + err.Error()
		return nil, wrong
	}
	if fields.Content == nil || *fields.Content == "" {
		wrong.Message = "content: must be a non-empty string"
		return nil, wrong
	}
	conversation, ok := identity(fields.ConversationID)
	if !ok {
		wrong.Message = "conversation_id: must be a string or an integer"
		return nil, wrong
	}
	return &v1.RunRequest{
		Message:        dualclaw.UserMessage(*fields.Content),
		ConversationId: conversation,
		Agent:          text(fields.Agent),
		RequestId:      text(fields.RequestID),
		Claw:           claw,
	}, nil
}

// identity reads an id; integers, of any size, are what older front-ends use.
func identity(raw json.RawMessage) (string, bool) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || bytes.Equal(raw, []byte("null")) {
		return "", true
	}
	if raw[0] == '"' {
		var found string
		err := json.Unmarshal(raw, &found)
		return found, err == nil
	}
	if strings.Trim(string(raw), "-0123456789") == "" {
		return string(raw), true
	}
	return "", false
}

func text(value *string) string {
	if value == nil {
		return ""
	}
	return *value
}

// failure is the error event that tells a failure outside the run.
func failure(err error) *v1.EngineEvent {
	var refused *dualclaw.Error
	if !errors.As(err, &refused) {
		refused = &dualclaw.Error{Reason: "INTERNAL", Message: err.Error()}
		if errors.Is(err, context.Canceled) {
			refused.Message = "the gateway is shutting down; the run goes on"
		}
	}
	return &v1.EngineEvent{Payload: &v1.EngineEvent_Error{Error: &v1.Error{
		Message: refused.Message,
		Diagnosis: &v1.Diagnosis{
			Code:      strings.Replace(strings.ToLower(refused.Reason), "_", ".", 1),
			Severity:  v1.Severity_SEVERITY_ERROR,
			Summary:   refused.Message,
			Hint:      refused.Metadata["hint"],
			Retryable: refused.RetryAfter > 0 || retryable[refused.Reason],
		},
	}}}
}
