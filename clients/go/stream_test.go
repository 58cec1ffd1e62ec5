package dualclaw_test

import (
	"context"
	"errors"
	"net"
	"sync"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	dualclaw "github.com/dualclaw/dualclaw-go"
	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

// fakeEngine plays one script per call, in order, over a real socket: events are sent, an error ends the call.
type fakeEngine struct {
	v1.UnimplementedEngineServiceServer

	mu       sync.Mutex
	scripts  [][]any
	headers  bool
	runs     []*v1.RunRequest
	attaches []*v1.AttachRequest
}

func (f *fakeEngine) next() []any {
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.scripts) == 0 {
		return []any{status.Error(codes.Internal, "no script is left")}
	}
	script := f.scripts[0]
	f.scripts = f.scripts[1:]
	return script
}

func play(f *fakeEngine, stream grpc.ServerStream, send func(...*v1.EngineEvent) error) error {
	script := f.next()
	if refused, ok := script[0].(error); ok {
		return refused
	}
	if f.headers {
		_ = stream.SendHeader(metadata.Pairs("dualclaw-run-id", "r", "dualclaw-conversation-id", "c"))
	}
	for _, step := range script {
		switch step := step.(type) {
		case error:
			return step
		case *v1.EngineEvent:
			if err := send(step); err != nil {
				return err
			}
		case []*v1.EngineEvent:
			if err := send(step...); err != nil {
				return err
			}
		case chan struct{}:
			select {
			case <-step:
			case <-stream.Context().Done():
				return stream.Context().Err()
			}
		}
	}
	return nil
}

func (f *fakeEngine) Run(request *v1.RunRequest, stream grpc.ServerStreamingServer[v1.RunResponse]) error {
	f.runs = append(f.runs, request)
	return play(f, stream, func(events ...*v1.EngineEvent) error { return stream.Send(&v1.RunResponse{Events: events}) })
}

func (f *fakeEngine) Attach(request *v1.AttachRequest, stream grpc.ServerStreamingServer[v1.AttachResponse]) error {
	f.attaches = append(f.attaches, request)
	return play(f, stream, func(events ...*v1.EngineEvent) error { return stream.Send(&v1.AttachResponse{Events: events}) })
}

func serveFake(t *testing.T, scripts ...[]any) (*fakeEngine, *dualclaw.Client) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	fake := &fakeEngine{scripts: scripts, headers: true}
	server := grpc.NewServer()
	v1.RegisterEngineServiceServer(server, fake)
	go func() { _ = server.Serve(listener) }()
	client, err := dualclaw.NewClient(listener.Addr().String(), dualclaw.WithToken("key"),
		dualclaw.WithReconnect(dualclaw.Reconnect{First: time.Millisecond, Total: time.Minute}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close(); server.Stop() })
	return fake, client
}

func delta(seq int32, text string) *v1.EngineEvent {
	return &v1.EngineEvent{Seq: seq, RunId: "r", Payload: &v1.EngineEvent_Delta{Delta: &v1.Delta{Content: text}}}
}

func done(seq int32) *v1.EngineEvent {
	return &v1.EngineEvent{Seq: seq, RunId: "r", Payload: &v1.EngineEvent_Done{Done: &v1.Done{}}}
}

var broken = status.Error(codes.Unavailable, "the connection broke")

func seqs(t *testing.T, stream *dualclaw.Stream, err error) []int32 {
	t.Helper()
	var found []int32
	for _, event := range collect(t, stream, err) {
		found = append(found, event.GetSeq())
	}
	return found
}

func expectSeqs(t *testing.T, found []int32, last int32) {
	t.Helper()
	for at, seq := range found {
		if seq != int32(at)+1 {
			t.Fatalf("events %v are not 1 to %d", found, last)
		}
	}
	if int32(len(found)) != last {
		t.Fatalf("events %v are not 1 to %d", found, last)
	}
}

// A lost stream goes on after the last event seen; what comes twice is skipped.
func TestLostStreamIsTakenUpAgain(t *testing.T) {
	fake, client := serveFake(t,
		[]any{delta(1, "a"), delta(2, "b"), broken},
		[]any{broken},
		[]any{[]*v1.EngineEvent{delta(2, "b"), delta(3, "c")}, broken},
		[]any{done(4)},
	)
	stream, err := client.Ask(context.Background(), "hi")
	expectSeqs(t, seqs(t, stream, err), 4)
	if fake.attaches[0].GetAfterSeq() != 2 || fake.attaches[2].GetAfterSeq() != 3 || stream.Reconnects() != 2 {
		t.Errorf("attached %v, %d reconnects", fake.attaches, stream.Reconnects())
	}
	if stream.RunID() != "r" || stream.ConversationID() != "c" {
		t.Errorf("ids %q %q", stream.RunID(), stream.ConversationID())
	}
}

// A start that broke before its first event is sent again with the same request_id.
func TestStartIsSentAgainWithItsRequestID(t *testing.T) {
	fake, client := serveFake(t, []any{broken}, []any{delta(1, "a"), done(2)})
	stream, err := client.Ask(context.Background(), "hi")
	expectSeqs(t, seqs(t, stream, err), 2)
	if len(fake.runs) != 2 || fake.runs[0].GetRequestId() == "" || fake.runs[0].GetRequestId() != fake.runs[1].GetRequestId() {
		t.Errorf("started as %v", fake.runs)
	}
}

// An event that was left out counts as a loss: the stream attaches after the last good one.
func TestGapIsFilled(t *testing.T) {
	fake, client := serveFake(t, []any{delta(1, "a"), delta(3, "c")}, []any{delta(2, "b"), delta(3, "c"), done(4)})
	stream, err := client.Ask(context.Background(), "hi")
	expectSeqs(t, seqs(t, stream, err), 4)
	if fake.attaches[0].GetAfterSeq() != 1 {
		t.Errorf("attached %v", fake.attaches)
	}
}

// A stream that ends with OK before its segment does is lost once; ended so again it fails.
func TestEarlyEndsAreNotTakenForTheEnd(t *testing.T) {
	_, client := serveFake(t, []any{delta(1, "a")}, []any{delta(2, "b")}, []any{done(3)})
	stream, err := client.Ask(context.Background(), "hi")
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	count := 0
	for _, err := range stream.Events() {
		if failed = err; err == nil {
			count++
		}
	}
	if failed != nil || count != 3 {
		t.Errorf("%d events, then %v", count, failed)
	}
}

// What the engine itself refuses is final and has its reason, metadata, fields and delay.
func TestRefusalsAreTypedAndFinal(t *testing.T) {
	refused, _ := status.New(codes.FailedPrecondition, "busy").WithDetails(
		&errdetails.ErrorInfo{Reason: "CONVERSATION_BUSY", Domain: "dualclaw", Metadata: map[string]string{"run_id": "r"}},
		&errdetails.BadRequest{FieldViolations: []*errdetails.BadRequest_FieldViolation{{Field: "f", Description: "d"}}},
	)
	fake, client := serveFake(t, []any{refused.Err()}, []any{done(1)})
	_, err := client.Ask(context.Background(), "hi")
	var found *dualclaw.Error
	if !errors.As(err, &found) || found.Reason != "CONVERSATION_BUSY" || found.Metadata["run_id"] != "r" || found.Fields["f"] != "d" {
		t.Fatalf("refused with %#v", err)
	}
	if status.Code(err) != codes.FailedPrecondition || len(fake.runs) != 1 {
		t.Errorf("code %v after %d calls", status.Code(err), len(fake.runs))
	}
}

// An engine that sends no headers is understood all the same: by its first message, or its refusal.
func TestEnginesWithoutHeadersAreUnderstood(t *testing.T) {
	fake, client := serveFake(t, []any{delta(1, "a"), broken}, []any{done(2)}, []any{refusedAttach.Err()})
	fake.headers = false
	stream, err := client.Ask(context.Background(), "hi")
	expectSeqs(t, seqs(t, stream, err), 2)
	if stream.RunID() != "r" {
		t.Errorf("run id %q", stream.RunID())
	}
	_, err = client.Attach(context.Background(), &v1.AttachRequest{RunId: "r", AfterSeq: 9})
	if dualclaw.ReasonOf(err) != "AFTER_SEQ_OUT_OF_RANGE" {
		t.Errorf("attached with %v", err)
	}
}

var refusedAttach, _ = status.New(codes.OutOfRange, "beyond the end").WithDetails(
	&errdetails.ErrorInfo{Reason: "AFTER_SEQ_OUT_OF_RANGE", Domain: "dualclaw"},
)

// Nobody listens there: the first call says so at once.
func TestNoEngineFailsAtOnce(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	listener.Close()
	client, err := dualclaw.NewClient(listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	_, err = client.Ask(context.Background(), "hi")
	var found *dualclaw.Error
	if !errors.As(err, &found) || !found.Unreachable {
		t.Errorf("failed with %#v", err)
	}
}

// A context that ends ends the stream with its cause, and nothing is tried again.
func TestContextEndsTheStream(t *testing.T) {
	forever := make(chan struct{})
	fake, client := serveFake(t, []any{delta(1, "a"), forever})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := client.Ask(ctx, "hi")
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	for _, err := range stream.Events() {
		failed = err
		cancel()
	}
	if !errors.Is(failed, context.Canceled) || len(fake.attaches) != 0 {
		t.Errorf("ended with %v, attached %v", failed, fake.attaches)
	}
}

// A stream that never comes back fails when its time is over, and says where it stood.
func TestGivesUpInTheEnd(t *testing.T) {
	scripts := [][]any{{delta(1, "a"), broken}}
	for range 1000 {
		scripts = append(scripts, []any{broken})
	}
	_, address := serveAt(t, "127.0.0.1:0", &fakeEngine{headers: true, scripts: scripts})
	fast := newClient(t, address,
		dualclaw.WithReconnect(dualclaw.Reconnect{First: time.Millisecond, Total: 500 * time.Millisecond}))
	stream, err := fast.Ask(context.Background(), "hi")
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	for _, err := range stream.Events() {
		failed = err
	}
	if dualclaw.ReasonOf(failed) != "STORE_UNAVAILABLE" {
		t.Errorf("failed with %v", failed)
	}
}

// The key goes with every call, unless the caller's context brings one of its own.
func TestTokenGoesWithEveryCall(t *testing.T) {
	_, client := serveFake(t)
	outgoing, _ := metadata.FromOutgoingContext(client.Context(context.Background()))
	if got := outgoing.Get("authorization"); len(got) != 1 || got[0] != "Bearer key" {
		t.Errorf("authorization %v", got)
	}
	own := metadata.AppendToOutgoingContext(context.Background(), "authorization", "Bearer mine")
	outgoing, _ = metadata.FromOutgoingContext(client.Context(own))
	if got := outgoing.Get("authorization"); len(got) != 1 || got[0] != "Bearer mine" {
		t.Errorf("authorization %v", got)
	}
}
