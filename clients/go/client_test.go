package dualclaw_test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	dualclaw "github.com/dualclaw/dualclaw-go"
	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

func newClient(t *testing.T, address string, opts ...dualclaw.Option) *dualclaw.Client {
	t.Helper()
	client, err := dualclaw.NewClient(address, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

// serveAt runs an engine that plays scripts at an address, which may have had another one before.
func serveAt(t *testing.T, address string, fake *fakeEngine, opts ...grpc.ServerOption) (*grpc.Server, string) {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(opts...)
	v1.RegisterEngineServiceServer(server, fake)
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	return server, listener.Addr().String()
}

// dialing is a client's dialer that tells when nobody listened.
func dialing(refused chan<- struct{}) dualclaw.Option {
	return dualclaw.WithDialOptions(grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
		if err != nil {
			select {
			case refused <- struct{}{}:
			default:
			}
		}
		return conn, err
	}))
}

// An engine that was reached before and is away for a moment at the next start is waited for; one run is started.
func TestAStartWaitsForAnEngineThatIsBrieflyAway(t *testing.T) {
	server, address := serveAt(t, "127.0.0.1:0", &fakeEngine{headers: true, scripts: [][]any{{done(1)}}})
	refused := make(chan struct{}, 1)
	client := newClient(t, address, dialing(refused), dualclaw.WithReconnect(dualclaw.Reconnect{First: time.Millisecond}))
	stream, err := client.Ask(context.Background(), "hi")
	expectSeqs(t, seqs(t, stream, err), 1)
	server.Stop()

	type answer struct {
		stream *dualclaw.Stream
		err    error
	}
	answered := make(chan answer, 1)
	go func() {
		stream, err := client.Ask(context.Background(), "hi again")
		answered <- answer{stream, err}
	}()
	<-refused
	back := &fakeEngine{headers: true, scripts: [][]any{{delta(1, "a"), done(2)}}}
	serveAt(t, address, back)
	got := <-answered
	expectSeqs(t, seqs(t, got.stream, got.err), 2)
	if len(back.runs) != 1 {
		t.Errorf("started %d runs", len(back.runs))
	}
}

// The wait for an engine that is away is bounded, may be switched off, and ends with the context.
func TestTheWaitForAnEngineThatIsAwayIsBounded(t *testing.T) {
	for name, start := range map[string]time.Duration{"short": 20 * time.Millisecond, "none": -1, "until the context ends": time.Hour} {
		t.Run(name, func(t *testing.T) {
			server, address := serveAt(t, "127.0.0.1:0", &fakeEngine{headers: true, scripts: [][]any{{done(1)}}})
			refused := make(chan struct{}, 1)
			limits := dualclaw.Reconnect{Start: start, Total: 2 * time.Hour, First: time.Millisecond}
			client := newClient(t, address, dialing(refused), dualclaw.WithReconnect(limits))
			stream, err := client.Ask(context.Background(), "hi")
			expectSeqs(t, seqs(t, stream, err), 1)
			server.Stop()
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			for err == nil || !strings.Contains(err.Error(), "no engine answers") { // until the client has noticed
				_, err = client.GetRun(ctx, "r")
			}
			<-refused
			go func() {
				<-refused
				if start == time.Hour {
					cancel()
				}
			}()
			_, err = client.Ask(ctx, "hi again")
			var found *dualclaw.Error
			switch {
			case start == time.Hour && !errors.Is(err, context.Canceled):
				t.Errorf("failed with %v", err)
			case start != time.Hour && (!errors.As(err, &found) || !found.Unreachable):
				t.Errorf("failed with %v", err)
			}
		})
	}
}

// A request that cannot be written is refused at once, by the field's name where protobuf knows it, and never retried.
func TestTextThatIsNoUTF8IsRefusedAtOnce(t *testing.T) {
	fake, client := serveFake(t)
	_, asked := client.Ask(context.Background(), "broken \xff")
	_, resumed := client.Resume(context.Background(), &v1.ResumeRequest{RunId: "\xff"})
	_, attached := client.Attach(context.Background(), &v1.AttachRequest{RunId: "\xff"})
	_, got := client.GetRun(context.Background(), "\xff")
	for _, err := range []error{asked, resumed, attached, got} {
		if dualclaw.ReasonOf(err) != "INVALID_REQUEST" || status.Code(err) != codes.InvalidArgument {
			t.Errorf("refused with %v", err)
		}
	}
	if len(fake.runs) != 0 {
		t.Errorf("%d calls", len(fake.runs))
	}
}

// A key with a line break, as files have it at their end, is refused where it was given, and its text is not repeated.
func TestAKeyThatCannotBeSentIsRefused(t *testing.T) {
	for name, option := range map[string]dualclaw.Option{
		"token":   dualclaw.WithToken("secret\n"),
		"tenant":  dualclaw.WithCaller("é", ""),
		"subject": dualclaw.WithCaller("", "a\x00"),
	} {
		if _, err := dualclaw.NewClient("127.0.0.1:1", option); err == nil || strings.Contains(err.Error(), "secret") || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, client := serveFake(t)
	ctx := metadata.AppendToOutgoingContext(context.Background(), "authorization", "Bearer secret\n")
	if _, err := client.Ask(ctx, "hi"); dualclaw.ReasonOf(err) != "INVALID_REQUEST" || strings.Contains(err.Error(), "secret") {
		t.Errorf("refused with %v", err)
	}
}

// An empty address is a mistake that is told at once.
func TestAnEmptyAddressIsRefused(t *testing.T) {
	if _, err := dualclaw.NewClient(""); err == nil {
		t.Error("an empty address was taken")
	}
}

// Nil requests stand for empty ones, as everywhere in protobuf.
func TestNilRequestsAreEmptyRequests(t *testing.T) {
	_, client := serveFake(t, []any{done(1)}, []any{done(1)})
	if _, err := client.Run(context.Background(), nil); err != nil {
		t.Error(err)
	}
	if _, err := client.Attach(context.Background(), nil); err != nil {
		t.Error(err)
	}
	if _, err := client.Resume(context.Background(), nil); status.Code(err) != codes.Unimplemented {
		t.Errorf("resumed with %v", err)
	}
	for _, err := range client.Runs(context.Background(), nil) {
		if status.Code(err) != codes.Unimplemented {
			t.Errorf("listed with %v", err)
		}
	}
}

// A closed client ends what is open and refuses what comes, both at once and by a name of its own.
func TestClosingAClientEndsItsStreams(t *testing.T) {
	limits := dualclaw.WithReconnect(dualclaw.Reconnect{Total: 100 * time.Hour, First: time.Hour, Longest: time.Hour})
	_, address := serveAt(t, "127.0.0.1:0", &fakeEngine{headers: true, scripts: [][]any{
		{delta(1, "a"), make(chan struct{})}, {delta(1, "a"), broken}, {broken}, {broken}, {broken},
	}})
	client := newClient(t, address, limits)
	for _, state := range []string{"reading", "waiting to connect again"} {
		stream, err := client.Ask(context.Background(), "hi")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := stream.Next(); err != nil {
			t.Fatal(err)
		}
		if state == "reading" {
			defer func() {
				if _, err := stream.Next(); !errors.Is(err, dualclaw.ErrClosed) {
					t.Errorf("reading ended with %v", err)
				}
			}()
			continue
		}
		time.AfterFunc(20*time.Millisecond, func() { client.Close() })
		if _, err := stream.Next(); !errors.Is(err, dualclaw.ErrClosed) {
			t.Errorf("%s ended with %v", state, err)
		}
	}
	if _, err := client.Ask(context.Background(), "hi"); !errors.Is(err, dualclaw.ErrClosed) {
		t.Errorf("asked with %v", err)
	}
	if _, err := client.GetRun(context.Background(), "r"); !errors.Is(err, dualclaw.ErrClosed) {
		t.Errorf("got with %v", err)
	}
}

// Another goroutine may close a stream; the reader sees its end and nothing more.
func TestAnotherGoroutineMayCloseAStream(t *testing.T) {
	_, client := serveFake(t, []any{delta(1, "a"), make(chan struct{})})
	stream, err := client.Ask(context.Background(), "hi")
	if err != nil {
		t.Fatal(err)
	}
	for event, err := range stream.Events() {
		if err != nil || event.GetSeq() != 1 {
			t.Fatal(event, err)
		}
		go stream.Close()
	}
	if _, err := stream.Next(); err != io.EOF {
		t.Errorf("after the end came %v", err)
	}
}

// A stream that failed stays failed: who reads on must not take silence for the end, nor start the run anew.
func TestAFailedStreamStaysFailed(t *testing.T) {
	gone, _ := status.New(codes.NotFound, "gone").WithDetails(&errdetails.ErrorInfo{Reason: "UNKNOWN_RUN", Domain: "dualclaw"})
	_, client := serveFake(t, []any{delta(1, "a"), broken}, []any{gone.Err()}, []any{done(2)})
	stream, err := client.Ask(context.Background(), "hi")
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	for _, err := range stream.Events() {
		failed = err
	}
	if dualclaw.ReasonOf(failed) != "UNKNOWN_RUN" {
		t.Fatalf("failed with %v", failed)
	}
	if _, err := stream.Next(); err != failed {
		t.Errorf("then came %v", err)
	}
}

// Calls that the context ends say so in the words of package context, whichever call it is.
func TestContextErrorsAreThoseOfTheContext(t *testing.T) {
	late := status.Error(codes.DeadlineExceeded, "the engine's clock is ahead")
	_, client := serveFake(t, []any{late})
	// The engine may see a deadline pass a moment before the client does.
	soon, cancel := context.WithTimeout(context.Background(), 40*time.Millisecond)
	defer cancel()
	if _, err := client.Ask(soon, "hi"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("asked with %v", err)
	}
	reason := errors.New("the user left")
	ended, end := context.WithCancelCause(context.Background())
	end(reason)
	_, asked := client.Ask(ended, "hi")
	_, got := client.GetRun(ended, "r")
	_, cancelled := client.Cancel(ended, "r", "")
	for _, err := range []error{asked, got, cancelled} {
		if !errors.Is(err, context.Canceled) || !errors.Is(err, reason) {
			t.Errorf("ended with %v", err)
		}
	}
}

// An Error passes on the engine's own status, so a service between keeps reason and metadata for its callers.
func TestAnErrorKeepsTheDetailsOfItsStatus(t *testing.T) {
	_, client := serveFake(t, []any{refusedAttach.Err()})
	_, err := client.Attach(context.Background(), &v1.AttachRequest{RunId: "r", AfterSeq: 9})
	details := status.Convert(err).Details()
	if info, ok := details[0].(*errdetails.ErrorInfo); !ok || info.GetReason() != "AFTER_SEQ_OUT_OF_RANGE" {
		t.Errorf("details %v", details)
	}
}

// A stream that was never taken up again names what stopped it.
func TestGivingUpKeepsTheCause(t *testing.T) {
	over, _ := status.New(codes.ResourceExhausted, "full").WithDetails(&errdetails.ErrorInfo{Reason: "OVERLOADED", Domain: "dualclaw"})
	_, address := serveAt(t, "127.0.0.1:0", &fakeEngine{headers: true, scripts: [][]any{{delta(1, "a"), over.Err()}}})
	client := newClient(t, address, dualclaw.WithReconnect(dualclaw.Reconnect{Total: -1}))
	stream, err := client.Ask(context.Background(), "hi")
	if err != nil {
		t.Fatal(err)
	}
	var failed error
	for _, err := range stream.Events() {
		failed = err
	}
	if !errors.Is(failed, &dualclaw.Error{Reason: "OVERLOADED"}) || dualclaw.ReasonOf(failed) != "STORE_UNAVAILABLE" || strings.Contains(failed.Error(), "-1ns") {
		t.Errorf("failed with %v", failed)
	}
}

// TLS is used when it is asked for, also without a Config; the key goes as bearer token.
func TestTLSAndKey(t *testing.T) {
	web := httptest.NewTLSServer(nil)
	defer web.Close()
	authorities := x509.NewCertPool()
	authorities.AddCert(web.Certificate())
	var keys []string
	_, address := serveAt(t, "127.0.0.1:0", &fakeEngine{headers: true, scripts: [][]any{{done(1)}}},
		grpc.Creds(credentials.NewTLS(&tls.Config{Certificates: web.TLS.Certificates})),
		grpc.StreamInterceptor(func(server any, stream grpc.ServerStream, _ *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
			incoming, _ := metadata.FromIncomingContext(stream.Context())
			keys = incoming.Get("authorization")
			return handler(server, stream)
		}))
	client := newClient(t, address, dualclaw.WithTLS(&tls.Config{RootCAs: authorities}), dualclaw.WithToken("key"))
	stream, err := client.Ask(context.Background(), "hi")
	expectSeqs(t, seqs(t, stream, err), 1)
	if len(keys) != 1 || keys[0] != "Bearer key" {
		t.Errorf("keys %v", keys)
	}
	strange := newClient(t, address, dualclaw.WithTLS(nil))
	if _, err := strange.Ask(context.Background(), "hi"); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("without an authority it failed with %v", err)
	}
}

// Messages far above gRPC's own limit of 4 MiB come through.
func TestBigMessagesComeThrough(t *testing.T) {
	big := strings.Repeat("x", 20<<20)
	_, client := serveFake(t, []any{delta(1, big), done(2)})
	stream, err := client.Ask(context.Background(), "hi")
	if events := collect(t, stream, err); len(events[0].GetDelta().GetContent()) != len(big) {
		t.Error("the text was cut")
	}
}
