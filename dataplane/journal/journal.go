// Package journal keeps what became of connections and requests: one Entry at
// the end of each, which feeds the counters, the log and the ring that answers
// "why did this go there?".
//
//   - An Entry is a fixed value: keeping one allocates nothing, and nothing in
//     it outlives or holds a request's memory (Fault is a text made for it).
//   - The ring holds the last entries only; refusals and failures have one of
//     their own, so that ordinary traffic does not push them out, and each pod has a
//     share of both, so that another's do not either.
//   - Safe for concurrent use; a writer waits at most for one copy.
//
// It knows no decision: it is told.
package journal

import (
	"log/slog"
	"net/netip"
	"strconv"
	"sync/atomic"
	"time"

	"aether/dataplane/model"
	"aether/dataplane/plain"
)

// Text is a bounded copy of bytes a peer sent.
type Text struct {
	n uint8
	b [79]byte
}

// Set copies b, cut at what fits.
func (t *Text) Set(b []byte) { t.n = uint8(copy(t.b[:], b)) }

// SetString copies s, cut at what fits.
func (t *Text) SetString(s string) { t.n = uint8(copy(t.b[:], s)) }

func (t *Text) String() string { return string(t.b[:t.n]) }

// Empty reports whether nothing was set.
func (t *Text) Empty() bool { return t.n == 0 }

// Entry is one connection or request, told once, at its end.
type Entry struct {
	At        time.Time     // when it ended
	Took      time.Duration // from accept or head to end
	Request   bool          // an HTTP request; else a connection
	Dir       model.Direction
	Namespace string // of the pod
	Workload  string // its ServiceAccount
	Pod       string // its name
	Container string // and the ID of its sandbox: two pods may have had one name
	Loop      int    // one more than the ID of the loop that tells of it (of one engine); 0: told by another goroutine
	Dst       netip.AddrPort
	Sniff     model.Sniff
	Host      Text // authority, or server name
	Method    Text
	Path      Text
	Action    string // closed sets: names of decide's constants
	Reason    string
	Rule      string // of the snapshot
	Backend   string // "shop/cart:8080"
	Endpoint  netip.AddrPort
	Socket    string // inbound, the Unix socket that it was delivered to: "unix:app.sock"; empty: an address
	Peer      string // verified SPIFFE ID: the caller inbound, the destination outbound
	Status    int
	BytesIn   int64 // from the pod's client side
	BytesOut  int64
	// AuditFilter is the first filter in mode AUDIT that would have denied the request, AuditPolicy its policy that held; empty: none.
	AuditFilter, AuditPolicy string

	Attempts  int
	Exhausted bool   // as many as there may be
	Local     bool   // the answer was the proxy's own
	Ended     string // who ended it first
	Code      string // of a request that ended early: why, an exchange.Code
	Cause     string // what went wrong, out of a closed set; empty: nothing
	Fault     string // of a message that could not be read: the field, the byte or the limit; a text of its own, at most 400 bytes, not in any label
	RequestID Text   // x-request-id; set where Failed
	Flags     Flags  // Envoy's, by Classify
	Details   string // and its response_code_details
	Outcome   Text   // the destination's word: "200;-;GET;via_upstream"
	Version   uint64 // of the snapshot that decided
}

// Bad reports whether the entry is kept among the refusals and failures.
func (e *Entry) Bad() bool {
	return e.Action == "refuse" || e.Status >= 500 || e.Ended == "server" || e.Ended == "proxy"
}

// String is the entry in a line. What peers sent is in it as plain.Append writes it:
//
//	12:00:01.123 shop/web > 10.96.0.10:8080 http1 GET cart:8080/items 200 forward shop/cart:8080 (declared-http Service shop/cart) via 10.1.2.10:18008 0.5ms in 0 out 12
func (e *Entry) String() string {
	b := make([]byte, 0, 512)
	b = e.At.UTC().AppendFormat(b, "15:04:05.000 ")
	f := model.Flow{Namespace: e.Namespace, Workload: e.Workload, Dir: e.Dir, Dst: model.OrigDst{AddrPort: e.Dst}, Sniff: e.Sniff}
	if e.Dir == model.Inbound {
		f.Peer = e.Peer
	}
	if !e.Request {
		f.Host = e.Host.String()
	}
	b = append(b, f.String()...)
	if e.Request {
		b = append(append(b, ' '), e.Method.String()...)
		b = append(append(b, ' '), e.Host.String()...)
		b = append(b, e.Path.String()...)
		b = strconv.AppendInt(append(b, ' '), int64(e.Status), 10)
	}
	b = append(append(b, ' '), e.Action...)
	if e.Backend != "" {
		b = append(append(b, ' '), e.Backend...)
	}
	b = append(append(b, " ("...), e.Reason...)
	if e.Rule != "" {
		b = append(append(b, ' '), e.Rule...)
	}
	b = append(b, ')')
	if e.AuditFilter != "" {
		b = append(append(append(b, " ("...), e.AuditFilter...), " would deny it"...)
		if e.AuditPolicy != "" {
			b = append(append(b, " by policy "...), e.AuditPolicy...)
		}
		b = append(b, ", were it not for audit only)"...)
	}
	if e.Endpoint.IsValid() {
		b = append(append(b, " via "...), e.Endpoint.String()...)
	}
	if e.Socket != "" {
		b = append(append(b, " via "...), e.Socket...)
	}
	if e.Dir != model.Inbound && e.Peer != "" {
		b = append(append(b, " peer "...), e.Peer...)
	}
	b = append(append(b, ' '), e.Took.Round(10*time.Microsecond).String()...)
	b = strconv.AppendInt(append(b, " in "...), e.BytesIn, 10)
	b = strconv.AppendInt(append(b, " out "...), e.BytesOut, 10)
	if e.Attempts > 1 {
		b = strconv.AppendInt(append(b, " attempts "...), int64(e.Attempts), 10)
	}
	if e.Ended != "" && e.Ended != "complete" {
		b = append(append(b, " ended by "...), e.Ended...)
	}
	if e.Cause != "" {
		b = append(append(b, " cause "...), e.Cause...)
	}
	if e.Fault != "" {
		b = append(append(append(b, " ("...), e.Fault...), ')')
	}
	if !e.Outcome.Empty() {
		b = append(append(b, " outcome "...), e.Outcome.String()...)
	}
	return plain.String(string(b))
}

// Observer is told of every entry, classified, on the loop where it ended or in a
// goroutine of a relay: it must not block. The entry may be used only until Ended returns.
//
// This is the one place where what watches requests attaches: the counters and the
// failure log (telemetry), the ring behind "why", the access log of --access-log.
// A full access log, OTLP export or tracing is one more Observer in cmd/aether-proxy's
// Tee: it copies what it needs of the entry into a bounded queue, counts what does not
// fit, and does its work in a goroutine of its own, as telemetry.Failures does. What
// such an observer needs and the entry does not say is added to the entry.
type Observer interface{ Ended(e *Entry) }

// Tee tells several observers.
type Tee []Observer

// Ended is Observer.
func (t Tee) Ended(e *Entry) {
	for _, o := range t {
		o.Ended(e)
	}
}

// Log writes a line an entry. It is for nodes that ask for an access log: the
// line is made and written where the entry is told.
type Log struct {
	log   *slog.Logger
	share atomic.Pointer[shares]
}

// Share says whether entries are logged.
type Share struct {
	On      bool
	Success uint8 // percent of the successes; failures and refusals are all (accessLogSuccessSampleRate, contract 10.9)
}

// shares are what holds; it does not change but for what was told.
type shares struct {
	all share
	of  map[string]*share // by namespace
}

type share struct {
	Share
	told atomic.Uint64 // successes
}

// NewLog makes a Log that is off.
func NewLog(l *slog.Logger) *Log {
	out := &Log{log: l}
	out.Set(Share{}, nil)
	return out
}

// Set says what is logged, and what of the pods of namespaces that have it otherwise. Safe
// for concurrent use.
func (l *Log) Set(all Share, of map[string]Share) {
	s := &shares{of: make(map[string]*share, len(of))}
	s.all.Share = all
	for ns, x := range of {
		s.of[ns] = &share{Share: x}
	}
	l.share.Store(s)
}

// Ended is Observer.
func (l *Log) Ended(e *Entry) {
	all := l.share.Load()
	s := &all.all
	if len(all.of) > 0 {
		if x := all.of[e.Namespace]; x != nil {
			s = x
		}
	}
	if !s.On {
		return
	}
	if share := uint64(min(s.Success, 100)); share < 100 && !e.Failed() {
		// Evenly spread: the n-th is logged when the share of n has grown by one.
		if n := s.told.Add(1); n*share/100 == (n-1)*share/100 {
			return
		}
	}
	l.log.Info(e.String())
}
