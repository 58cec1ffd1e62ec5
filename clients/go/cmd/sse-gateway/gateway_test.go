package main

import (
	"bufio"
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	dualclaw "github.com/dualclaw/dualclaw-go"
	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

// engine answers every run with one event, and then ends it, floods it, or keeps silent until its caller leaves.
type engine struct {
	v1.UnimplementedEngineServiceServer
	runs chan *v1.RunRequest
	left chan struct{}
	keys chan []string
}

func (e *engine) Run(request *v1.RunRequest, stream grpc.ServerStreamingServer[v1.RunResponse]) error {
	incoming, _ := metadata.FromIncomingContext(stream.Context())
	e.runs <- request
	e.keys <- incoming.Get("authorization")
	_ = stream.SendHeader(metadata.Pairs("dualclaw-run-id", "r"))
	text := strings.Repeat("x", 1<<10)
	events := []*v1.EngineEvent{{Seq: 1, RunId: "r", Payload: &v1.EngineEvent_Delta{Delta: &v1.Delta{Content: "a"}}}}
	question := request.GetMessage().GetParts()[0].GetText()
	if question == "end" {
		events = append(events, &v1.EngineEvent{Seq: 2, RunId: "r", Payload: &v1.EngineEvent_Done{Done: &v1.Done{Content: "a"}}})
	}
	_ = stream.Send(&v1.RunResponse{Events: events})
	for seq := int32(2); question == "flood"; seq++ {
		more := &v1.EngineEvent{Seq: seq, RunId: "r", Payload: &v1.EngineEvent_Delta{Delta: &v1.Delta{Content: text}}}
		if stream.Send(&v1.RunResponse{Events: []*v1.EngineEvent{more}}) != nil {
			break
		}
	}
	if question != "end" {
		<-stream.Context().Done()
		e.left <- struct{}{}
	}
	return nil
}

// start runs engine and gateway on loopback; stop ends the gateway as SIGTERM does and waits until it has ended.
func start(t *testing.T, limits limits) (fake *engine, address string, stop func()) {
	t.Helper()
	listen := func() net.Listener {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return listener
	}
	fake = &engine{runs: make(chan *v1.RunRequest, 9), left: make(chan struct{}, 9), keys: make(chan []string, 9)}
	server, engineListener, listener := grpc.NewServer(), listen(), listen()
	v1.RegisterEngineServiceServer(server, fake)
	go func() { _ = server.Serve(engineListener) }()
	client, err := dualclaw.NewClient(engineListener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, client, listener, limits) }()
	stopped := false
	stop = func() {
		if cancel(); !stopped {
			stopped = true
			if err := <-ended; err != nil {
				t.Errorf("the gateway ended with %v", err)
			}
		}
	}
	t.Cleanup(func() { stop(); client.Close(); server.Stop() })
	return fake, listener.Addr().String(), stop
}

func post(t *testing.T, address, body string, headers ...string) *http.Response {
	t.Helper()
	request, err := http.NewRequest(http.MethodPost, "http://"+address+"/messages/stream", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for at := 0; at < len(headers); at += 2 {
		if request.Header.Set(headers[at], headers[at+1]); headers[at] == "Host" {
			request.Host = headers[at+1]
		}
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { response.Body.Close() })
	return response
}

func bodyOf(t *testing.T, response *http.Response) string {
	t.Helper()
	text, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

const firstFrame = `data: {"type": "delta", "content": "a"}` + "\n\n"

// A run comes as frames and nothing else, under the headers of the route; the caller's key goes on to the engine.
func TestARunComesAsFrames(t *testing.T) {
	fake, address, _ := start(t, defaults)
	response := post(t, address, `{"content": "end", "conversation_id": 12345678901234567890}`, "Authorization", "bearer key")
	got := bodyOf(t, response)
	if response.StatusCode != 200 || !strings.HasPrefix(got, firstFrame+`data: {"type": "done"`) {
		t.Errorf("%s %q", response.Status, got)
	}
	for name, value := range map[string]string{
		"Content-Type": "text/event-stream", "Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no",
	} {
		if response.Header.Get(name) != value {
			t.Errorf("%s is %q", name, response.Header.Get(name))
		}
	}
	if run, keys := <-fake.runs, <-fake.keys; run.GetConversationId() != "12345678901234567890" || run.GetClaw() != "web" ||
		len(keys) != 1 || keys[0] != "Bearer key" {
		t.Errorf("%v with %v", run, keys)
	}
}

// Whatever cannot be asked is one error frame that names what is wrong.
func TestBadBodiesAreErrorFrames(t *testing.T) {
	fake, address, _ := start(t, defaults)
	for body, problem := range map[string]string{
		``:                                     "body: is not JSON",
		`{`:                                    "body: is not JSON",
		`{"content": "end"} x`:                 "body: is not JSON",
		`[]`:                                   "body: must be one JSON object",
		`null`:                                 "body: must be one JSON object",
		"{\"content\": \"\xff\"}":              "body: is not JSON: it is not UTF-8",
		`{"content": "end", "content": "end"}`: "body: is not JSON: a key is given twice",
		`{}`:                                   "content: must be a non-empty string",
		`{"CONTENT": "end"}`:                   "content: must be a non-empty string",
		`{"content": 1, "agent": 2}`:           "content: must be a non-empty string; agent: must be a string",
		`{"content": "end", "request_id": []}`: "request_id: must be a string",
		`{"content":"end","conversation_id":1.0}`:  "conversation_id: must be a string or an integer",
		`{"content":"end","conversation_id":true}`: "conversation_id: must be a string or an integer",
	} {
		response := post(t, address, body)
		got := bodyOf(t, response)
		if response.StatusCode != 200 || !strings.HasPrefix(got, `data: {"type": "error", "message": "`+problem) ||
			!strings.Contains(got, `"code": "invalid.request", "severity": "error"`) || strings.Count(got, "data: ") != 1 {
			t.Errorf("%s: %s %q", body, response.Status, got)
		}
	}
	for _, header := range []string{"Basic abc", "Bearer ", "Bearer \xe9"} {
		if got := bodyOf(t, post(t, address, `{"content": "end"}`, "Authorization", header)); !strings.Contains(got, `"code": "unauthenticated"`) {
			t.Errorf("%q: %q", header, got)
		}
	}
	if len(fake.runs) != 0 {
		t.Errorf("%d runs were started", len(fake.runs))
	}
}

// What never was a request to this route is refused by its status: too large, too slow, another site's page.
func TestWhatIsNoRequestIsRefusedByItsStatus(t *testing.T) {
	fake, address, _ := start(t, defaults)
	if got := post(t, address, strings.Repeat(" ", maxBody+1)); got.StatusCode != http.StatusRequestEntityTooLarge {
		t.Errorf("too large: %s", got.Status)
	}
	if got := post(t, address, `{"content": "end"}`, "Origin", "https://evil.example"); got.StatusCode != http.StatusForbidden {
		t.Errorf("another origin: %s", got.Status)
	}
	if got := post(t, address, `{"content": "end"}`, "Host", "evil.example"); got.StatusCode != http.StatusForbidden {
		t.Errorf("another host: %s", got.Status)
	}
	quick := defaults
	quick.body = 50 * time.Millisecond
	_, address, _ = start(t, quick)
	slow, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer slow.Close()
	_, _ = io.WriteString(slow, "POST /messages/stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
	if got, err := http.ReadResponse(bufio.NewReader(slow), nil); err != nil || got.StatusCode != http.StatusRequestTimeout {
		t.Errorf("too slow: %v %v", got, err)
	}
	if len(fake.runs) != 0 {
		t.Errorf("%d runs were started", len(fake.runs))
	}
}

// A client that leaves, also while the model is silent, ends the call to the engine.
func TestAClientThatLeavesEndsTheCall(t *testing.T) {
	fake, address, _ := start(t, defaults)
	response := post(t, address, `{"content": "silence"}`)
	frame := make([]byte, len(firstFrame))
	if _, err := io.ReadFull(response.Body, frame); err != nil || string(frame) != firstFrame {
		t.Fatalf("%q %v: a frame is not held back", frame, err)
	}
	response.Body.Close()
	<-fake.left
}

// A stream that is silent for longer than a body may take goes on.
func TestTheTimeForTheBodyEndsWithTheBody(t *testing.T) {
	quick := defaults
	quick.body = 200 * time.Millisecond
	fake, address, _ := start(t, quick)
	post(t, address, `{"content": "silence"}`)
	select {
	case <-fake.left:
		t.Error("the call was ended")
	case <-time.After(3 * quick.body):
	}
}

// A client that has stopped reading is given up.
func TestAClientThatStopsReadingIsGivenUp(t *testing.T) {
	quick := defaults
	quick.write = 2 * time.Second
	fake, address, _ := start(t, quick)
	post(t, address, `{"content": "flood"}`)
	<-fake.left
}

// On SIGTERM an open stream is told why it ends, and the gateway ends after that.
func TestShutdownTellsOpenStreams(t *testing.T) {
	fake, address, stop := start(t, defaults)
	response := post(t, address, `{"content": "silence"}`)
	<-fake.runs
	stop()
	if got := bodyOf(t, response); !strings.Contains(got, `"the gateway is shutting down; the run goes on"`) || !strings.Contains(got, `"code": "store.unavailable"`) {
		t.Errorf("%q", got)
	}
	<-fake.left
}

// Callers are not told the engine's address.
func TestAnEngineThatIsAwayIsToldWithoutItsAddress(t *testing.T) {
	client, err := dualclaw.NewClient("127.0.0.1:1")
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	_, refused := client.Ask(context.Background(), "hi")
	if got, _ := dualclaw.OriginalFrame(failure(refused)); strings.Contains(got, "127.0.0.1") || !strings.Contains(got, "the gateway cannot reach its engine") {
		t.Errorf("%q", got)
	}
}
