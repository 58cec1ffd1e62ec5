package dualclaw

import (
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Domain is the ErrorInfo domain of the engine's own errors.
const Domain = "dualclaw"

// Error is a call that failed: refused by the engine, or never answered by one.
//
// Reason is a name of ErrorReason without its prefix, such as "CONVERSATION_BUSY"; it is what programs decide on.
// Unreachable tells the two meanings of STORE_UNAVAILABLE apart: no engine was reached at all.
type Error struct {
	Reason      string
	Message     string
	Code        codes.Code
	Metadata    map[string]string
	Fields      map[string]string // field -> what is wrong with it, for INVALID_REQUEST
	RetryAfter  time.Duration     // 0: nothing was said
	Unreachable bool

	own bool // the engine itself said so, by an ErrorInfo
}

// Error returns the message with its reason.
func (e *Error) Error() string {
	return fmt.Sprintf("%s: %s", e.Reason, e.Message)
}

// GRPCStatus makes status.FromError and status.Code work on an Error.
func (e *Error) GRPCStatus() *status.Status {
	return status.New(e.Code, e.Message)
}

// Is makes errors.Is compare by reason: errors.Is(err, &dualclaw.Error{Reason: "UNKNOWN_RUN"}).
func (e *Error) Is(target error) bool {
	var other *Error
	return errors.As(target, &other) && other.Reason == e.Reason
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
	result := &Error{Reason: "INTERNAL", Message: found.Message(), Code: found.Code(), Metadata: map[string]string{}}
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
