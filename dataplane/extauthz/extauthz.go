// Package extauthz asks the authorization service about requests (contract 10.7)
// and holds each until there is an answer.
//
//   - No loop waits: a request is parked, its question goes out from a goroutine, and
//     the answer comes back by the loop's mailbox. One whose client has gone is given up.
//   - It fails closed: whatever is not a "yes" refuses the request.
//   - All filters of a chain are asked, in order, and about both spellings of a path
//     that has two; each sees what the ones before it changed.
//   - What is in flight is bounded, of one pod and of the node: one pod's requests
//     cannot keep another's from being asked about.
//
// grpc-go stands here alone. It is the well-kept client of that protocol, and this is a
// side path: a request that no filter governs never comes here. It knows no route:
// the outbound and inbound sides say what to ask and act on the answer.
package extauthz

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"aether/dataplane/authz"
	"aether/dataplane/share"
	"aether/dataplane/telemetry"
)

// Target is where the authorization service of a node is (contract 10.7).
const Target = "unix:///run/aether/authz/authz.sock"

// Bounds of questions (docs/limits.md is about these).
const (
	DefaultTimeout = 200 * time.Millisecond // of one question (contract 10.7)

	maxAsked = 512 // questions in flight, of the node; see package share for a pod's part

	connectTime = time.Second // a connect to the service counts as failed
	againTime   = time.Second // most that is waited before the next
)

// Config of a Service. The zero value is usable.
type Config struct {
	Target  string        // in grpc-go's form; empty: Target
	Timeout time.Duration // of one question; 0: DefaultTimeout
	Log     *slog.Logger  // nil: discard
}

// Service is the authorization service as the proxy sees it. It dials from the proxy's
// own namespace, when it is asked first. Safe for concurrent use.
type Service struct {
	conn    *grpc.ClientConn
	timeout time.Duration
	quiet   *telemetry.LogLimiter

	// Asked counts questions by how they ended, in the order of Results.
	Asked [results]telemetry.Counter

	mu   sync.Mutex
	all  int            // questions in flight; guarded by mu
	pods map[string]int // by container; guarded by mu
}

// New makes a Service. Nothing is dialled yet.
func New(cfg Config) (*Service, error) { return newService(cfg) }

// newService is New, with more that grpc-go is told.
func newService(cfg Config, more ...grpc.DialOption) (*Service, error) {
	if cfg.Target == "" {
		cfg.Target = Target
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = DefaultTimeout
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	conn, err := grpc.NewClient(cfg.Target, append(more,
		grpc.WithTransportCredentials(insecure.NewCredentials()), // it is a socket of the node's
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 2, Jitter: 0.2, MaxDelay: againTime},
			MinConnectTimeout: connectTime,
		}),
		grpc.WithDisableServiceConfig(), grpc.WithDisableRetry(), grpc.WithNoProxy(), grpc.WithUserAgent("aether"),
		grpc.WithDefaultCallOptions(grpc.ForceCodec(codec{}), grpc.MaxCallRecvMsgSize(authz.MaxAnswer)),
	)...)
	if err != nil {
		return nil, fmt.Errorf("extauthz: %s: %w", cfg.Target, err)
	}
	return &Service{conn: conn, timeout: cfg.Timeout, quiet: telemetry.NewLogLimiter(cfg.Log, time.Minute, nil), pods: map[string]int{}}, nil
}

// Close ends what is in flight; what was asked then fails.
func (s *Service) Close() error { return s.conn.Close() }

// codec hands grpc-go messages that are bytes already. Its name is what the content type says.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(v any) ([]byte, error) { return *v.(*[]byte), nil }

func (codec) Unmarshal(b []byte, v any) error {
	*v.(*[]byte) = append([]byte(nil), b...) // the memory is grpc-go's
	return nil
}

// enter counts a question in; false: too many are in flight.
func (s *Service) enter(pod string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !share.Room(s.pods[pod], s.all, maxAsked) {
		return false
	}
	s.all++
	s.pods[pod]++
	return true
}

func (s *Service) leave(pod string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all--
	if s.pods[pod]--; s.pods[pod] == 0 {
		delete(s.pods, pod)
	}
}

// ask asks one question, and blocks for at most the Service's limit.
func (s *Service) ask(ctx context.Context, question []byte) (authz.Answer, error) {
	ctx, cancel := context.WithTimeout(ctx, s.timeout)
	defer cancel()
	var b []byte
	if err := s.conn.Invoke(ctx, "/envoy.service.auth.v3.Authorization/Check", &question, &b); err != nil {
		return authz.Answer{}, err
	}
	return authz.Parse(b)
}

// tell logs what is wrong with an answer, once a cause in a while. Not to be called on a loop.
func (s *Service) tell(filter string, a *authz.Answer, err error) {
	switch {
	case err != nil:
		_, text := why(err)
		s.quiet.Warn("ext-authz "+text, "authorization service", "what", text, "filter", filter, "err", err)
	case a.Ignored > 0:
		s.quiet.Warn("ext-authz ignored "+filter, "authorization service: changes left out that are not its to make",
			"what", "pseudo-headers, framing, x-aether-*, x-forwarded-client-cert", "filter", filter, "changes", a.Ignored)
	}
}

// why is what became of a question that got no answer, in words that are few.
func why(err error) (result int, text string) {
	switch {
	case status.Code(err) == codes.DeadlineExceeded:
		return timedOut, "it did not answer in time"
	case status.Code(err) == codes.Unavailable:
		return unreachable, "it cannot be reached"
	case errors.Is(err, authz.ErrFailed):
		return failed, "it says that it could not judge the request"
	}
	return failed, "it gave no answer that can be read"
}

// Results of questions, as they are counted.
const (
	allowed = iota
	denied
	timedOut
	unreachable
	failed   // an error, or no answer that can be read
	overflow // not asked: too many are in flight, or no memory is left for the body
	cancelled
	results
)

// Results are the names of what Service.Asked counts.
var Results = [results]string{"allowed", "denied", "timeout", "unreachable", "error", "overflow", "cancelled"}
