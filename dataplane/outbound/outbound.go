// Package outbound carries what a pod sends: captured connections and the
// proxy port. It asks decide what each one is, serves HTTP request by request
// over the hop, and hands everything else to a relay.
//
//   - Identity and namespace come from the listener's pod; nothing on the wire is believed.
//   - No certificate of the pod's own, no hop: 503, and nothing is dialled.
//   - What passes through is decided once a connection, and leaves from the pod's namespace.
//   - One journal entry at the end of each request and of each connection that carried none.
//
// It knows no listener, no registry and no TLS: those are given to it.
package outbound

import (
	"log/slog"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"aether/dataplane/decide"
	"aether/dataplane/detect"
	"aether/dataplane/engine"
	"aether/dataplane/exchange"
	"aether/dataplane/extauthz"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/reactor"
	"aether/dataplane/relay"
	"aether/dataplane/snapshot"
	"aether/dataplane/telemetry"
	"aether/meshhop"
)

// Config of the outbound side. All fields are required but those that say what nil is.
type Config struct {
	Store   *snapshot.Store
	Dialer  *meshhop.Dialer
	Journal journal.Observer
	Authz   *extauthz.Service // nil: nobody can be asked, and what a filter wants asked is refused
	Relay   relay.Options     // of raw TCP and of what is passed through
	Log     *slog.Logger      // nil: discard

	// Want asks for the rows of a service that a request, or a connection, waits for (contract
	// 4.6); RetryWaiting is called when there are new rows. Called on loops: it must not block. nil: rows
	// cannot be asked for, and nobody waits for any.
	Want func(model.ServiceName)

	// LocalDestination is the destination's side of a pod of this node, by container; nil: it is not
	// served here, and the hop is taken. Any goroutine. nil: none ever is.
	LocalDestination func(container string) LocalDestination
}

// LocalDestination is a pod of this process as a destination.
type LocalDestination interface {
	// Engine is the pod's; Local what it would shake hands as.
	Engine() *engine.Pod
	Local() *meshhop.Local
	// Admit takes a source that has been verified, as an accepted hop would be taken;
	// its requests are served on l. nil: the destination refuses it. Any goroutine.
	Admit(l *engine.Loop, m *meshhop.LocalPeer) *engine.ConnInfo
	// Declined tells of a source that was not who it has to be. Any goroutine.
	Declined(err error)
}

// Outbound serves the pods that are added to it.
type Outbound struct {
	cfg   Config
	log   *slog.Logger
	quiet *telemetry.LogLimiter
	loops engine.PerLoop[loopState]
	now   func() time.Time // the wall clock
	bonds meshhop.Bonds

	sweep sync.Mutex
	swept *snapshot.Snapshot // of the last OnSnapshot

	// Relays are the connections that goroutines carry.
	Relays engine.Relays

	// Audits counts what filters in mode AUDIT make of requests.
	Audits telemetry.Audits

	Retries         telemetry.Counter // requests sent once more
	RetriesOverflow telemetry.Counter // and those that were not, because too many others were

	// Mirrored counts copies of requests by how they ended, in the order of MirrorResults.
	Mirrored [mirrorResults]telemetry.Counter

	// Cold counts requests and connections that waited for rows by how that ended, in the order of ColdResults.
	Cold [coldResults]telemetry.Counter

	waiting atomic.Int64 // for rows
}

// loopState is what the outbound side keeps on one loop.
type loopState struct {
	o         *Outbound
	l         *engine.Loop
	pool      exchange.Pool
	hops      map[hopKey]*hopState
	pods      map[*Pod]*upstreams
	rnd       *rand.Rand
	detectors detect.Pool[opening]
	mirrored  exchange.Pool // of mirrors
	audits    telemetry.AuditShard
	mirrors   int           // under way
	end       journal.Entry // scratch: observers copy what they keep

	waiting map[waiter]struct{} // what waits for rows

	lastPod *Pod // whose upstreams last is; nil: none
	last    *upstreams
	sweep   reactor.Timer
}

// waiter is a request or a connection that waits for rows.
type waiter interface {
	reconsider(snap *snapshot.Snapshot) // decides about it in the world as it is now
}

// opening is the verdict on a connection before its first byte, and the world that it was made in.
type opening struct {
	v    decide.Verdict
	snap *snapshot.Snapshot
}
