package dualclaw

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Domain is the ErrorInfo domain of the engine's own errors.
const Domain = "dualclaw"

// ErrClosed is what calls and streams of a closed Client fail with, wrapped in an Error.
var ErrClosed = errors.New("dualclaw: the client is closed")

// Error is a call that failed: refused by the engine, or never answered by one.
//
// Reason is a name of ErrorReason without its prefix, such as "CONVERSATION_BUSY"; it is what programs decide on.
// Unreachable tells the two meanings of STORE_UNAVAILABLE apart: no engine was reached at all.
//
// A call that its context ended fails with an error of package context instead, and with the context's cause:
// errors.Is(err, context.DeadlineExceeded).
type Error struct {
	Reason      string
	Message     string // for people; says what is wrong and what would be right
	Code        codes.Code
	Metadata    map[string]string // what a program needs to act, such as run_id; nil reads as empty
	Fields      map[string]string // field -> what is wrong with it, for INVALID_REQUEST
	RetryAfter  time.Duration     // 0: nothing was said
	Unreachable bool

	own    bool           // the engine itself said so, by an ErrorInfo
	status *status.Status // what came over the wire, with its details
	cause  error
}

// Error returns the message with its reason.
func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s", e.Reason, e.Message)
}

// GRPCStatus makes status.FromError and status.Code work on an Error. A status that the engine sent keeps its details,
// so a service between may return the Error to its own callers.
func (e *Error) GRPCStatus() *status.Status {
	if e.status != nil {
		return e.status
	}
	return status.New(e.Code, e.Message)
}

// Unwrap returns what led to the error, such as the last failure of a stream that was not taken up again; often nil.
func (e *Error) Unwrap() error { return e.cause }

// Is makes errors.Is compare by reason: errors.Is(err, &dualclaw.Error{Reason: "UNKNOWN_RUN"}).
func (e *Error) Is(target error) bool {
	other, ok := target.(*Error)
	return ok && other.Reason == e.Reason
}

// ReasonOf returns the reason of an error of this package, "" for any other.
func ReasonOf(err error) string {
	var found *Error
	if errors.As(err, &found) {
		return found.Reason
	}
	return ""
}

// Reasons for statuses that bring none of their own, from a proxy or the transport.
var fallbackReasons = map[codes.Code]string{
	codes.InvalidArgument:   "INVALID_REQUEST",
	codes.Unauthenticated:   "UNAUTHENTICATED",
	codes.PermissionDenied:  "PERMISSION_DENIED",
	codes.ResourceExhausted: "OVERLOADED",
	codes.Unavailable:       "STORE_UNAVAILABLE",
}

func errorOf(err error) *Error {
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	found := status.Convert(err)
	result := &Error{Reason: "INTERNAL", Message: found.Message(), Code: found.Code(), Metadata: map[string]string{}, status: found}
	if reason, ok := fallbackReasons[found.Code()]; ok {
		result.Reason = reason
	}
	for _, detail := range found.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			if detail.GetDomain() == Domain {
				result.Reason, result.Metadata, result.own = detail.GetReason(), detail.GetMetadata(), true
			}
		case *errdetails.BadRequest:
			result.Fields = map[string]string{}
			for _, violation := range detail.GetFieldViolations() {
				result.Fields[violation.GetField()] = violation.GetDescription()
			}
		case *errdetails.RetryInfo:
			result.RetryAfter = detail.GetRetryDelay().AsDuration()
		}
	}
	return result
}

// clocksDiffer is how much earlier than the client an engine may see a deadline pass.
const clocksDiffer = 50 * time.Millisecond

// endedBy returns why a call failed if its context did it, nil if something else did.
func endedBy(ctx context.Context, failed *Error) error {
	if err := ctx.Err(); err != nil {
		if cause := context.Cause(ctx); cause != err {
			return fmt.Errorf("%w: %w", err, cause)
		}
		return err
	}
	deadline, bounded := ctx.Deadline()
	if bounded && failed.Code == codes.DeadlineExceeded && time.Until(deadline) < clocksDiffer {
		return context.DeadlineExceeded
	}
	return nil
}
