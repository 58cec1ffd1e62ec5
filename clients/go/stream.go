package dualclaw

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

// Rules of a stream, and their reasons
//
//   - Every event comes once and in order. What was seen already is skipped; what was left out counts as a loss.
//   - A start whose answer got lost is sent again with its request_id; once an event was seen, Attach goes on after it.
//   - The engine's own refusal is final. Of an attach, those are not that pass by themselves.
//   - Trouble ends by progress. Without a new event for Reconnect.Total the stream fails.
//   - "Nobody listens there" at the very first attempt fails at once: waiting would not help who has mistyped.

const (
	startTimeout = 30 * time.Second
	statusWait   = 500 * time.Millisecond
	// How long an attach without headers is waited for.
	headerlessWait = time.Second
	runIDKey       = "dualclaw-run-id"
	conversations  = "dualclaw-conversation-id"
)

// batch is what the three streaming rpcs have in common: the events of one message.
type batch interface {
	GetEvents() []*v1.EngineEvent
}

// call is one streaming call, whichever rpc it is.
type call interface {
	Header() (metadata.MD, error)
	recv() (batch, error)
}

type streamOf[T any, P interface {
	*T
	batch
}] struct {
	grpc.ServerStreamingClient[T]
}

func (s streamOf[T, P]) recv() (batch, error) {
	message, err := s.Recv()
	if err != nil {
		return nil, err
	}
	return P(message), nil
}

// start is what a stream begins with.
type start interface {
	open(context.Context, v1.EngineServiceClient) (call, error)
	// ids returns the run's and the conversation's id as far as the request knows them.
	ids() (string, string)
}

type runStart struct{ request *v1.RunRequest }

func (s *runStart) ids() (string, string) { return "", s.request.GetConversationId() }
func (s *runStart) open(ctx context.Context, engine v1.EngineServiceClient) (call, error) {
	stream, err := engine.Run(ctx, s.request)
	return streamOf[v1.RunResponse, *v1.RunResponse]{stream}, err
}

type resumeStart struct{ request *v1.ResumeRequest }

func (s *resumeStart) ids() (string, string) { return s.request.GetRunId(), "" }
func (s *resumeStart) open(ctx context.Context, engine v1.EngineServiceClient) (call, error) {
	stream, err := engine.Resume(ctx, s.request)
	return streamOf[v1.ResumeResponse, *v1.ResumeResponse]{stream}, err
}

type attachStart struct{ request *v1.AttachRequest }

func (s *attachStart) ids() (string, string) { return s.request.GetRunId(), "" }
func (s *attachStart) open(ctx context.Context, engine v1.EngineServiceClient) (call, error) {
	stream, err := engine.Attach(ctx, s.request)
	return streamOf[v1.AttachResponse, *v1.AttachResponse]{stream}, err
}

// Stream is the events of a run or segment, each once and in order, over lost connections. One goroutine reads it.
type Stream struct {
	client     *Client
	start      start
	oneSegment bool
	ctx        context.Context
	cancel     context.CancelFunc

	current call
	hangUp  context.CancelFunc
	first   chan received // of a call without headers
	buffer  []*v1.EngineEvent

	runID, conversationID string
	lastSeq, seen         int32
	reconnects            int
	accepted, ended       bool
	stalled               bool
	refusable             bool // an attach is open and has brought no message yet
	attempts              int
	troubleSince          time.Time
}

type received struct {
	message batch
	err     error
}

// loss is a call that ended without OK; what is done about it depends on when.
type loss struct {
	err       *Error
	again     bool // the transport failed, so a start may be sent again
	attach    bool // an attach may be tried again
	connected bool
}

func (l *loss) Error() string { return l.err.Error() }

var (
	startLost   = map[codes.Code]bool{codes.Unavailable: true, codes.Internal: true, codes.Canceled: true}
	attachLost  = map[codes.Code]bool{codes.Unavailable: true, codes.Internal: true, codes.Canceled: true, codes.Aborted: true, codes.ResourceExhausted: true, codes.DeadlineExceeded: true}
	attachLater = map[string]bool{"STORE_UNAVAILABLE": true, "OVERLOADED": true, "QUOTA_EXCEEDED": true, "SLOW_CLIENT": true}
)

func (c *Client) judge(err error) *loss {
	var known *loss
	if errors.As(err, &known) {
		return known
	}
	meant := errorOf(err)
	if meant.own {
		return &loss{err: meant, attach: attachLater[meant.Reason], connected: true}
	}
	connected := !c.isDown()
	switch meant.Code {
	case codes.Unavailable:
		meant.Unreachable = true
		if connected {
			meant.Message = fmt.Sprintf("the connection to the engine at %s broke: %s", c.target, meant.Message)
		} else {
			meant.Message = fmt.Sprintf("no engine answers at %s: %s", c.target, meant.Message)
		}
	case codes.Unimplemented:
		meant.Message = fmt.Sprintf("what answers at %s is no dualclaw engine, or one of another version: %s", c.target, meant.Message)
	}
	return &loss{err: meant, again: startLost[meant.Code], attach: attachLost[meant.Code], connected: connected}
}

func (c *Client) open(ctx context.Context, start start) (*Stream, error) {
	ctx, cancel := context.WithCancel(c.Context(ctx))
	stream := &Stream{client: c, start: start, oneSegment: true, ctx: ctx, cancel: cancel}
	stream.runID, stream.conversationID = start.ids()
	if attach, ok := start.(*attachStart); ok {
		stream.oneSegment = false
		stream.seen = attach.request.GetAfterSeq()
		stream.lastSeq = stream.seen
	}
	if err := stream.connect(); err != nil {
		stream.Close()
		return nil, err
	}
	return stream, nil
}

// RunID is the id of the run.
func (s *Stream) RunID() string { return s.runID }

// ConversationID is the id of its conversation; "" when the engine has not said it.
func (s *Stream) ConversationID() string { return s.conversationID }

// LastSeq is the position of the newest event handed out; keep it to attach later.
func (s *Stream) LastSeq() int32 { return s.lastSeq }

// Reconnects is how often the stream was lost and taken up again.
func (s *Stream) Reconnects() int { return s.reconnects }

// Close ends the call at once. The run goes on.
func (s *Stream) Close() {
	s.ended = true
	s.drop()
	s.cancel()
}

// Events yields the events until the segment (of an attach: the stream) ends, and closes the stream. A stream that
// fails yields one error as its last pair; Next goes on where a loop was left.
func (s *Stream) Events() iter.Seq2[*v1.EngineEvent, error] {
	return func(yield func(*v1.EngineEvent, error) bool) {
		for {
			event, err := s.Next()
			if errors.Is(err, io.EOF) {
				s.Close()
				return
			}
			if err != nil {
				s.Close()
				yield(nil, err)
				return
			}
			if !yield(event, nil) {
				return
			}
		}
	}
}

// Next returns the next event; io.EOF after the last.
func (s *Stream) Next() (*v1.EngineEvent, error) {
	for len(s.buffer) == 0 {
		if s.ended {
			s.awaitStatus()
			return nil, io.EOF
		}
		if err := s.fill(); err != nil {
			return nil, err
		}
	}
	event := s.buffer[0]
	s.buffer = s.buffer[1:]
	s.lastSeq = max(s.lastSeq, event.GetSeq())
	return event, nil
}

// fill reads one message, or takes up a lost stream once.
func (s *Stream) fill() error {
	if s.current == nil {
		if err := s.connect(); err != nil {
			return err
		}
	}
	message, err := s.receive()
	if err == nil {
		err = s.take(message)
	} else if errors.Is(err, io.EOF) {
		err = s.endOfCall()
	}
	if err == nil {
		return nil
	}
	lost := s.client.judge(err)
	s.drop()
	if s.ctx.Err() != nil || s.refusable && !lost.attach {
		return s.failure(lost)
	}
	return s.pause(lost)
}

func (s *Stream) failure(lost *loss) error {
	if err := s.ctx.Err(); err != nil {
		return fmt.Errorf("dualclaw: %s: %w", s.position(), context.Cause(s.ctx))
	}
	return lost.err
}

func (s *Stream) endOfCall() error {
	s.refusable = false
	if s.oneSegment {
		return s.stall("the engine ended the stream before the end of the segment")
	}
	s.ended = true
	return nil
}

// take keeps what is new of a message and notes where the stream stands.
func (s *Stream) take(message batch) error {
	s.refusable = false
	for _, event := range message.GetEvents() {
		seq := event.GetSeq()
		if seq > 0 && seq <= s.seen {
			continue
		}
		if seq > s.seen+1 && (s.seen > 0 || !s.oneSegment) {
			if len(s.buffer) == 0 {
				return s.stall(fmt.Sprintf("the engine left out event %d", s.seen+1))
			}
			s.drop() // what came before the gap is good; after it the next read attaches
			return nil
		}
		s.buffer = append(s.buffer, event)
		s.seen = max(s.seen, seq)
		s.attempts, s.troubleSince, s.stalled = 0, time.Time{}, false
		if s.oneSegment && (event.GetDone() != nil || event.GetError() != nil) {
			s.ended = true
			return nil
		}
	}
	return nil
}

// stall counts a stream that the engine spoilt as lost, once; spoilt again at the same place it fails.
func (s *Stream) stall(problem string) error {
	failed := &Error{Reason: "INTERNAL", Message: problem + " (" + s.position() + ")", Code: codes.Internal}
	again := !s.stalled
	s.stalled = true
	if !again {
		s.refusable = true // nothing helps any more
	}
	return &loss{err: failed, again: again, attach: again, connected: true}
}

// connect opens a call and waits until the engine has accepted it, as often as it takes.
func (s *Stream) connect() error {
	for {
		lost := s.openCall()
		if lost == nil {
			if s.accepted {
				s.reconnects++
			}
			s.accepted = true
			return nil
		}
		s.drop()
		if s.ctx.Err() != nil || !s.mayRepeat(lost) {
			return s.failure(lost)
		}
		if err := s.pause(lost); err != nil {
			return err
		}
	}
}

func (s *Stream) mayRepeat(lost *loss) bool {
	if s.accepted {
		return lost.attach
	}
	return lost.again && (lost.connected || !s.troubleSince.IsZero())
}

func (s *Stream) openCall() *loss {
	next := s.start
	if s.accepted && (s.seen > 0 || !s.oneSegment) {
		attach, ok := s.start.(*attachStart)
		request := &v1.AttachRequest{RunId: s.runID, AfterSeq: s.seen, Wait: ok && attach.request.GetWait()}
		next = &attachStart{request}
	}
	_, s.refusable = next.(*attachStart)
	ctx, hangUp := context.WithCancel(s.ctx)
	s.hangUp = hangUp
	late := time.AfterFunc(startTimeout, hangUp)
	opened, err := next.open(ctx, s.client.Engine)
	if err == nil {
		var header metadata.MD
		if header, err = opened.Header(); err == nil {
			err = s.accept(opened, header)
		}
	}
	if !late.Stop() && s.ctx.Err() == nil {
		text := fmt.Sprintf("the engine at %s did not answer within %s", s.client.target, startTimeout)
		return &loss{err: &Error{Reason: "STORE_UNAVAILABLE", Message: text, Code: codes.Unavailable, Unreachable: true}, again: true, attach: true, connected: true}
	}
	if err != nil {
		return s.client.judge(err)
	}
	return nil
}

func (s *Stream) accept(opened call, header metadata.MD) error {
	s.current = opened
	if found := header.Get(runIDKey); len(found) > 0 {
		s.runID = found[0]
		if found := header.Get(conversations); len(found) > 0 && found[0] != "" {
			s.conversationID = found[0]
		}
		return nil
	}
	// A refusal without headers, or a foreign engine that sends none: the first message or the status tells which. An
	// attach to a silent run may bring neither for a long time, so of that nobody waits long.
	first := make(chan received, 1)
	go func() {
		message, err := opened.recv()
		first <- received{message, err}
	}()
	patience := make(<-chan time.Time)
	if !s.oneSegment {
		patience = time.After(headerlessWait)
	}
	select {
	case found := <-first:
		if found.err != nil && !errors.Is(found.err, io.EOF) {
			return found.err
		}
		if found.err == nil && len(found.message.GetEvents()) > 0 && found.message.GetEvents()[0].GetRunId() != "" {
			s.runID = found.message.GetEvents()[0].GetRunId()
		}
		first <- found
	case <-patience:
	}
	s.first = first
	return nil
}

// receive returns the next message, the first of which may have been read by accept.
func (s *Stream) receive() (batch, error) {
	if s.first == nil {
		return s.current.recv()
	}
	found := <-s.first
	s.first = nil
	return found.message, found.err
}

// pause waits before the next attempt; it fails when there is none left.
func (s *Stream) pause(lost *loss) error {
	now := time.Now()
	if s.troubleSince.IsZero() {
		s.troubleSince = now
	}
	limits := s.client.reconnect
	var delay time.Duration
	if s.attempts > 0 {
		delay = min(limits.Longest, limits.First<<min(s.attempts-1, 20))
		delay = time.Duration(float64(delay) * (0.5 + rand.Float64()))
		delay = max(delay, lost.err.RetryAfter)
	}
	s.attempts++
	if now.Add(delay).Sub(s.troubleSince) >= limits.Total {
		if !s.accepted {
			return lost.err
		}
		text := fmt.Sprintf("the stream was lost and not taken up again within %s (%s); last: %s", limits.Total, s.position(), lost.err.Message)
		return &Error{Reason: "STORE_UNAVAILABLE", Message: text, Code: codes.Unavailable, Unreachable: true}
	}
	select {
	case <-time.After(delay):
		return nil
	case <-s.ctx.Done():
		return s.failure(lost)
	}
}

func (s *Stream) position() string {
	run := s.runID
	if run == "" {
		run = "unknown"
	}
	return fmt.Sprintf("run %s, after event %d", run, s.seen)
}

// awaitStatus lets the call end by itself after its last event, so that both sides record OK and no cancellation.
func (s *Stream) awaitStatus() {
	if s.current == nil {
		return
	}
	impatient := time.AfterFunc(statusWait, s.hangUp)
	defer impatient.Stop()
	_, _ = s.receive() // whatever it is, the segment has had its end
	s.drop()
}

func (s *Stream) drop() {
	if s.hangUp != nil {
		s.hangUp()
	}
	s.current, s.hangUp, s.first = nil, nil, nil
}
