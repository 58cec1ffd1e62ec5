package dualclaw

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"sync/atomic"
	"time"

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
//   - "Nobody listens there" fails at once where nobody was ever reached: waiting would not help who has mistyped. An
//     engine that was reached before is waited for, for Reconnect.Start: it is being restarted, and a start carries a
//     request_id, so sending it again starts nothing twice.

const (
	startTimeout = 30 * time.Second
	statusWait   = 500 * time.Millisecond
	// How long an attach without headers is waited for.
	headerlessWait = time.Second
	runIDKey       = "dualclaw-run-id"
	conversations  = "dualclaw-conversation-id"
)

// Stream is the events of a run or segment, each once and in order, over lost connections. One goroutine reads it; any
// may close it. Close it unless it was read to its end.
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
	closed                atomic.Bool
	failed                error // what Next returns from now on
	stalled               bool
	away                  bool // nobody has listened since the start was first tried
	refusable             bool // an attach is open and has brought no message yet
	attempts              int
	troubleSince          time.Time
}

type received struct {
	message batch
	err     error
}

func (c *Client) open(ctx context.Context, start start) (*Stream, error) {
	ctx = c.Context(ctx)
	if err := checkSendable(ctx, start.message()); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	stream := &Stream{client: c, start: start, oneSegment: true, ctx: ctx, cancel: cancel}
	stream.runID, stream.conversationID = start.ids()
	if attach, ok := start.(*attachStart); ok {
		stream.oneSegment = false
		stream.seen = attach.request.GetAfterSeq()
		stream.lastSeq = stream.seen
	}
	if err := stream.connect(); err != nil {
		cancel()
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

// Close ends the call at once; who reads sees the end. The run goes on. It may be called more than once, and beside a
// reader.
func (s *Stream) Close() {
	s.closed.Store(true)
	s.cancel()
}

// Events yields the events until the segment (of an attach: the stream) ends. A stream that fails yields one error as
// its last pair. A loop that is left leaves the stream open: Next, or another loop, goes on there.
func (s *Stream) Events() iter.Seq2[*v1.EngineEvent, error] {
	return func(yield func(*v1.EngineEvent, error) bool) {
		for {
			event, err := s.Next()
			if err == io.EOF {
				return
			}
			if !yield(event, err) || err != nil {
				return
			}
		}
	}
}

// Next returns the next event; io.EOF after the last, and once the stream was closed. A stream that failed stays so.
func (s *Stream) Next() (*v1.EngineEvent, error) {
	for s.failed == nil && (len(s.buffer) == 0 || s.closed.Load()) {
		switch {
		case s.closed.Load():
			s.failed = io.EOF
		case s.ended:
			s.awaitStatus()
			s.failed = io.EOF
		default:
			s.failed = s.fill()
			if s.failed != nil && s.closed.Load() {
				s.failed = io.EOF
			}
		}
	}
	if s.failed != nil {
		s.drop()
		s.cancel()
		return nil, s.failed
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
	if err := s.endedBy(lost); err != nil {
		return err
	}
	if lost.final || s.refusable && !lost.attach {
		return lost.err
	}
	return s.pause(lost)
}

// endedBy returns why a call was lost if the caller's context did it, nil if something else did.
func (s *Stream) endedBy(lost *loss) error {
	if err := endedBy(s.ctx, lost.err); err != nil {
		return fmt.Errorf("dualclaw: %s: %w", s.position(), err)
	}
	return nil
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
			s.client.reached.Store(true)
			return nil
		}
		s.drop()
		if err := s.endedBy(lost); err != nil {
			return err
		}
		if !s.mayRepeat(lost) {
			return lost.err
		}
		if err := s.pause(lost); err != nil {
			return err
		}
	}
}

func (s *Stream) mayRepeat(lost *loss) bool {
	switch {
	case lost.final:
		return false
	case s.accepted:
		return lost.attach
	case s.troubleSince.IsZero():
		s.away = !lost.connected
	default:
		s.away = s.away && !lost.connected
	}
	return lost.again && (!s.away || s.client.reached.Load())
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
		return &loss{err: s.client.silent(startTimeout), again: true, attach: true, connected: true}
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
	var patience <-chan time.Time
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
	delay := lost.err.RetryAfter
	if s.attempts > 0 {
		wait := limits.First
		for range s.attempts - 1 {
			if wait *= 2; wait >= limits.Longest {
				break
			}
		}
		wait = time.Duration(float64(min(wait, limits.Longest)) * (0.5 + rand.Float64()))
		delay = max(delay, wait)
	}
	s.attempts++
	longest := limits.Total
	if s.away && !s.accepted {
		longest = min(limits.Start, limits.Total)
	}
	if now.Add(delay).Sub(s.troubleSince) >= longest {
		if !s.accepted {
			return lost.err
		}
		text := fmt.Sprintf("the stream was lost and not taken up again within %s (%s); last: %s", max(longest, 0), s.position(), lost.err.Message)
		return &Error{Reason: "STORE_UNAVAILABLE", Message: text, Code: codes.Unavailable, Unreachable: true, cause: lost.err}
	}
	select {
	case <-time.After(delay):
		return nil
	case <-s.ctx.Done():
		return s.endedBy(lost)
	case <-s.client.closed:
		return s.client.closedLoss().err
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
