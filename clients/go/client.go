// Package dualclaw is the Go client of a dualclaw engine: it starts runs, follows them over lost connections without
// losing or doubling an event, answers their questions, and writes events in the wire format of the contract.
//
// The messages and the plain stubs of every service are in gen/dualclaw/v1.
package dualclaw

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"iter"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	v1 "github.com/dualclaw/dualclaw-go/gen/dualclaw/v1"
)

const (
	maxMessage   = 64 << 20
	unaryTimeout = 30 * time.Second
)

// Reconnect says how a lost stream is taken up again. The zero value of a field stands for its default.
type Reconnect struct {
	// Total is the longest time without a new event before the stream fails; default 60 s, negative: never reconnect.
	Total time.Duration
	// Start is the longest time a start (Run, Resume, Attach) waits for an engine that this client has reached before
	// and that is away now, as during its restart; default 10 s, negative: such a start fails at once. A start at an
	// engine that was never reached always does.
	Start time.Duration
	// First is the wait before the second attempt, doubled each time and spread by chance; default 100 ms. The first
	// attempt is made at once.
	First time.Duration
	// Longest is the longest wait between two attempts; default 3 s.
	Longest time.Duration
}

func (r Reconnect) withDefaults() Reconnect {
	if r.Total == 0 {
		r.Total = time.Minute
	}
	if r.Start == 0 {
		r.Start = 10 * time.Second
	}
	if r.First <= 0 {
		r.First = 100 * time.Millisecond
	}
	if r.Longest <= 0 {
		r.Longest = 3 * time.Second
	}
	return r
}

// An Option changes how a client reaches its engine.
type Option func(*options)

type options struct {
	token, tenant, subject string
	tls                    *tls.Config
	reconnect              Reconnect
	dial                   []grpc.DialOption
}

// WithToken sends an API key or JWT with every call. Without WithTLS everybody on the way can read it.
func WithToken(token string) Option { return func(o *options) { o.token = token } }

// WithCaller acts for somebody else; only the role service may.
func WithCaller(tenant, subject string) Option {
	return func(o *options) { o.tenant, o.subject = tenant, subject }
}

// WithTLS encrypts the connection; a nil or zero Config trusts the system's authorities. A client without this option
// speaks plain text.
func WithTLS(config *tls.Config) Option {
	if config == nil {
		config = &tls.Config{}
	}
	return func(o *options) { o.tls = config }
}

// WithReconnect changes how lost streams are taken up again.
func WithReconnect(reconnect Reconnect) Option { return func(o *options) { o.reconnect = reconnect } }

// WithDialOptions adds options of gRPC, such as interceptors for tracing.
func WithDialOptions(dial ...grpc.DialOption) Option {
	return func(o *options) { o.dial = append(o.dial, dial...) }
}

// Client is a connection to one engine; safe for any number of goroutines.
type Client struct {
	// The plain stubs of the services, for what Client has no method for. Their calls need Client.Context, and their
	// errors are plain statuses.
	Engine        v1.EngineServiceClient
	Conversations v1.ConversationServiceClient
	Agents        v1.AgentServiceClient
	Operators     v1.OperatorServiceClient

	target    string
	conn      *grpc.ClientConn
	reconnect Reconnect
	caller    []string
	reached   atomic.Bool // an engine has answered
	closed    chan struct{}
	closing   sync.Once
}

// NewClient returns a client of the engine at target, HOST:PORT or any name gRPC can resolve. It connects with the
// first call. Close it when it is not needed any more.
func NewClient(target string, opts ...Option) (*Client, error) {
	var chosen options
	for _, option := range opts {
		option(&chosen)
	}
	if target == "" {
		return nil, errors.New("dualclaw: the engine's address is empty, it must be HOST:PORT")
	}
	for name, value := range map[string]string{"token": chosen.token, "tenant": chosen.tenant, "subject": chosen.subject} {
		if !isPrintable(value) {
			return nil, fmt.Errorf("dualclaw: the %s must be printable ASCII, without a line break", name)
		}
	}
	transport := insecure.NewCredentials()
	if chosen.tls != nil {
		transport = credentials.NewTLS(chosen.tls)
	}
	dial := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time: 30 * time.Second, Timeout: 10 * time.Second, PermitWithoutStream: true,
		}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
		grpc.WithDisableServiceConfig(), // retry policies from DNS would fight the rules of Stream
		grpc.WithDisableRetry(),
		grpc.WithConnectParams(grpc.ConnectParams{
			// gRPC's own pause grows to two minutes; a restarted engine is back sooner.
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 2 * time.Second},
			MinConnectTimeout: 5 * time.Second,
		}),
	}
	conn, err := grpc.NewClient(target, append(dial, chosen.dial...)...)
	if err != nil {
		return nil, fmt.Errorf("dualclaw: the engine's address %q: %w", target, err)
	}
	client := &Client{
		Engine:        v1.NewEngineServiceClient(conn),
		Conversations: v1.NewConversationServiceClient(conn),
		Agents:        v1.NewAgentServiceClient(conn),
		Operators:     v1.NewOperatorServiceClient(conn),
		target:        target,
		conn:          conn,
		reconnect:     chosen.reconnect.withDefaults(),
		closed:        make(chan struct{}),
	}
	for key, value := range map[string]string{"dualclaw-tenant": chosen.tenant, "dualclaw-subject": chosen.subject} {
		if value != "" {
			client.caller = append(client.caller, key, value)
		}
	}
	if chosen.token != "" {
		client.caller = append(client.caller, "authorization", "Bearer "+chosen.token)
	}
	return client, nil
}

// Close ends every call that is open and the connection; they fail with ErrClosed. Runs go on. Only the first Close
// does anything.
func (c *Client) Close() error {
	var err error
	c.closing.Do(func() {
		close(c.closed)
		err = c.conn.Close()
	})
	return err
}

// Context returns ctx with the client's credentials, for calls by the plain stubs. A token that ctx brings as
// outgoing "authorization" metadata takes the place of the client's own.
func (c *Client) Context(ctx context.Context) context.Context {
	outgoing, _ := metadata.FromOutgoingContext(ctx)
	var pairs []string
	for at := 0; at < len(c.caller); at += 2 {
		if len(outgoing.Get(c.caller[at])) == 0 {
			pairs = append(pairs, c.caller[at], c.caller[at+1])
		}
	}
	return metadata.AppendToOutgoingContext(ctx, pairs...)
}

// Run starts a run and returns its first segment as a stream, once the engine has accepted it. Without a request_id
// the client makes one, so that a start whose answer got lost is not started twice. The stream lives as long as ctx.
func (c *Client) Run(ctx context.Context, request *v1.RunRequest) (*Stream, error) {
	request = ownCopy(request)
	if request.GetRequestId() == "" {
		request.RequestId = newRequestID()
	}
	return c.open(ctx, &runStart{request})
}

// Ask is Run for a text: a new conversation with the engine's default agent.
func (c *Client) Ask(ctx context.Context, text string) (*Stream, error) {
	return c.Run(ctx, &v1.RunRequest{Message: UserMessage(text)})
}

// Resume answers an interrupted run and returns its next segment as a stream.
func (c *Client) Resume(ctx context.Context, request *v1.ResumeRequest) (*Stream, error) {
	request = ownCopy(request)
	if request.GetRequestId() == "" {
		request.RequestId = newRequestID()
	}
	return c.open(ctx, &resumeStart{request})
}

// Attach follows a run: every event after request.AfterSeq, stored ones first. With Wait it stays over parked phases
// until the run is final.
func (c *Client) Attach(ctx context.Context, request *v1.AttachRequest) (*Stream, error) {
	return c.open(ctx, &attachStart{ownCopy(request)})
}

// Cancel asks a run to end. The answer may still say RUNNING; its stream tells the end.
func (c *Client) Cancel(ctx context.Context, runID, reason string) (*v1.Run, error) {
	response, err := unary(ctx, c, c.Engine.Cancel, &v1.CancelRequest{RunId: runID, Reason: reason})
	return response.GetRun(), err
}

// GetRun returns a run.
func (c *Client) GetRun(ctx context.Context, runID string) (*v1.Run, error) {
	response, err := unary(ctx, c, c.Engine.GetRun, &v1.GetRunRequest{RunId: runID})
	return response.GetRun(), err
}

// Runs yields the runs that fit the request's filters, newest first, page by page as they are asked for.
func (c *Client) Runs(ctx context.Context, request *v1.ListRunsRequest) iter.Seq2[*v1.Run, error] {
	return func(yield func(*v1.Run, error) bool) {
		request := ownCopy(request)
		for {
			page, err := unary(ctx, c, c.Engine.ListRuns, request)
			if err != nil {
				yield(nil, err)
				return
			}
			for _, run := range page.GetRuns() {
				if !yield(run, nil) {
					return
				}
			}
			if request.PageToken = page.GetNextPageToken(); request.PageToken == "" {
				return
			}
		}
	}
}

// unary makes one call of an rpc that streams nothing; without a deadline in ctx it has one of its own.
func unary[Q proto.Message, A any](
	ctx context.Context, c *Client, rpc func(context.Context, Q, ...grpc.CallOption) (*A, error), request Q,
) (*A, error) {
	bounded := c.Context(ctx)
	if err := checkSendable(bounded, request); err != nil {
		return nil, err
	}
	if _, has := ctx.Deadline(); !has {
		var done context.CancelFunc
		bounded, done = context.WithTimeout(bounded, unaryTimeout)
		defer done()
	}
	answer, err := rpc(bounded, request)
	if err == nil {
		c.reached.Store(true)
		return answer, nil
	}
	lost := c.judge(err)
	if ended := endedBy(ctx, lost.err); ended != nil {
		return nil, fmt.Errorf("dualclaw: %w", ended)
	}
	if bounded.Err() != nil {
		return nil, c.silent(unaryTimeout)
	}
	return nil, lost.err
}

func (c *Client) isDown() bool {
	return c.conn.GetState() == connectivity.TransientFailure
}

// UserMessage returns a message of a user with this text.
func UserMessage(text string) *v1.Message {
	part := &v1.ContentPart{Part: &v1.ContentPart_Text{Text: text}}
	return &v1.Message{Role: v1.Role_ROLE_USER, Parts: []*v1.ContentPart{part}}
}

// ownCopy returns a copy of a request that is the client's to change; nil is an empty request.
func ownCopy[M any, P interface {
	*M
	proto.Message
}](request P) P {
	own := P(new(M))
	proto.Merge(own, request)
	return own
}

// checkSendable refuses what gRPC would only find out while sending, and then reports as if the transport had failed.
func checkSendable(ctx context.Context, request proto.Message) error {
	if _, err := proto.Marshal(request); err != nil {
		text := fmt.Sprintf("the request cannot be sent: %s", err)
		return &Error{Reason: "INVALID_REQUEST", Message: text, Code: codes.InvalidArgument, cause: err}
	}
	outgoing, _ := metadata.FromOutgoingContext(ctx)
	for key, values := range outgoing {
		if !strings.HasSuffix(key, "-bin") && !isPrintable(strings.Join(values, "")) {
			text := fmt.Sprintf("the metadata %q must be printable ASCII, without a line break", key)
			return &Error{Reason: "INVALID_REQUEST", Message: text, Code: codes.InvalidArgument}
		}
	}
	return nil
}

func isPrintable(text string) bool {
	return strings.IndexFunc(text, func(r rune) bool { return r < ' ' || r > '~' }) < 0
}

func newRequestID() string {
	if id, err := uuid.NewV7(); err == nil {
		return id.String()
	}
	return uuid.NewString()
}
