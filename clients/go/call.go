package dualclaw

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
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
	message() proto.Message
	// ids returns the run's and the conversation's id as far as the request knows them.
	ids() (string, string)
}

type runStart struct{ request *v1.RunRequest }

func (s *runStart) message() proto.Message { return s.request }
func (s *runStart) ids() (string, string)  { return "", s.request.GetConversationId() }
func (s *runStart) open(ctx context.Context, engine v1.EngineServiceClient) (call, error) {
	stream, err := engine.Run(ctx, s.request)
	return streamOf[v1.RunResponse, *v1.RunResponse]{stream}, err
}

type resumeStart struct{ request *v1.ResumeRequest }

func (s *resumeStart) message() proto.Message { return s.request }
func (s *resumeStart) ids() (string, string)  { return s.request.GetRunId(), "" }
func (s *resumeStart) open(ctx context.Context, engine v1.EngineServiceClient) (call, error) {
	stream, err := engine.Resume(ctx, s.request)
	return streamOf[v1.ResumeResponse, *v1.ResumeResponse]{stream}, err
}

type attachStart struct{ request *v1.AttachRequest }

func (s *attachStart) message() proto.Message { return s.request }
func (s *attachStart) ids() (string, string)  { return s.request.GetRunId(), "" }
func (s *attachStart) open(ctx context.Context, engine v1.EngineServiceClient) (call, error) {
	stream, err := engine.Attach(ctx, s.request)
	return streamOf[v1.AttachResponse, *v1.AttachResponse]{stream}, err
}

// loss is a call that ended without OK; what is done about it depends on when.
type loss struct {
	err       *Error
	again     bool // the transport failed, so a start may be sent again
	attach    bool // an attach may be tried again
	final     bool // nothing may be tried again, whatever was open
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
	select {
	case <-c.closed:
		return c.closedLoss()
	default:
	}
	if meant.own {
		c.reached.Store(true)
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

func (c *Client) closedLoss() *loss {
	text := fmt.Sprintf("the client of the engine at %s is closed", c.target)
	return &loss{err: &Error{Reason: "STORE_UNAVAILABLE", Message: text, Code: codes.Unavailable, Unreachable: true, cause: ErrClosed}, final: true}
}

// silent is the failure of a call that an engine took and never answered.
func (c *Client) silent(after time.Duration) *Error {
	text := fmt.Sprintf("the engine at %s did not answer within %s", c.target, after)
	return &Error{Reason: "STORE_UNAVAILABLE", Message: text, Code: codes.Unavailable, Unreachable: true}
}
