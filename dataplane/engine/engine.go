// Package engine puts HTTP connections on reactor loops: the drivers of
// http1 and http2 over plain sockets and TLS records, the pools of upstream
// connections, and the budget that keeps one pod from starving another.
//
//   - A pod has a home loop; its listeners, connections, hop sessions and
//     buffers live there and need no lock.
//   - An idle connection holds no buffer.
//   - What a peer can make us keep is bounded: read buffers, queued output,
//     unsent body bytes, waiting requests.
//   - Whoever closes a descriptor is the connection that registered it.
//
// It knows no route, identity or policy: an exchange.Service decides, and the
// sockets and sessions it needs are given to it.
package engine

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"aether/dataplane/exchange"
	"aether/dataplane/reactor"
)

// Bounds of the engine, one place (docs/limits.md is about these).
const (
	readBuf     = 16 << 10  // an HTTP/1 connection's read buffer while bytes move
	bigReadBuf  = 64 << 10  // when a head does not fit (contract 17: heads up to 60 KiB)
	outHigh     = 256 << 10 // queued output of an HTTP/1 connection before its source is stopped
	h2OutMax    = 512 << 10 // queued output of an HTTP/2 client before no more of its requests are read
	sealMax     = 256 << 10 // plaintext sealed at once
	keepBufs    = 256       // free small buffers a loop keeps of each kind
	smallOut    = 4 << 10   // a connection's output buffer to begin with
	bigOut      = 320 << 10 // and when bulk moves: what may be queued, its framing, and its records
	keepPend    = 64 << 10  // a free stream's buffer bigger than this is not kept
	keepSlack   = 64 << 10  // empty buffers of an HTTP/2 connection beyond this go trimAfter its last byte
	fieldSize   = 48        // bytes of a field beside its text
	keepBig     = 16        // free big buffers a loop keeps
	keepStreams = 4096      // free streams a loop keeps

	h2Window = 16 << 20 // receive window of an HTTP/2 connection; what a stream keeps for a slow reader takes nothing of it

	lifeMargin  = 2 * time.Minute         // a hop session takes no new requests this long before its certificates end
	goawayTime  = int64(30 * time.Second) // a client of HTTP/2 is told so long before its session's certificates end, or at half of their rest
	leaveTime   = int64(5 * time.Second)  // for the requests that are under way at an endpoint that has left
	maxWaiters  = 1024                    // requests that wait for one hop, or one HTTP/2 application
	maxSessions = 4                       // hop sessions a key (contract 5.2)
	maxDrains   = 64                      // answers a session throws away while they come
	pairHigh    = 64 << 10                // bytes of a request's body on the way in process before its source is stopped
	keepPairs   = 1024                    // free pairs a loop keeps
	maxAppH2    = 32                      // connections to one port of an HTTP/2 application
	maxIdleApp  = 256                     // idle connections to one port of one application
	lingerBytes = 64 << 20
	lingerTime  = int64(2 * time.Second)
	headTime    = int64(15 * time.Second) // first byte of a head to its last
	idleDown    = int64(5 * time.Minute)  // downstream connection without a request
	idleStream  = int64(5 * time.Minute)  // exchange without a byte either way
	streamGrace = int64(5 * time.Second)  // that a client's HTTP/2 stream has longer, for an answer that says so
	tickAfter   = int64(time.Second)      // between two Ticks of an HTTP/2 connection that is read from
	trimAfter   = int64(2 * time.Second)  // an HTTP/2 connection without a stream gives its memory back
	idleHop     = int64(30 * time.Second) // hop session without a stream
	warnAfter   = int64(time.Second)      // an HTTP/2 client that comes while the process drains is served before it is told
	settleTime  = int64(time.Second)      // from there to the last request that is taken: what it had begun to send arrives
	stallTime   = int64(5 * time.Second)  // what waits in a stream of a hop that holds too much, before the stream ends
	stallLook   = int64(time.Second)      // between two looks for such streams
	leastPause  = int64(10 * time.Millisecond)
	mostPause   = int64(time.Second)            // before a hop is dialled again whose sessions carry nothing, doubled each time
	pingAfter   = int64(5 * time.Second)        // silence of a peer that owes an answer before it is asked whether it lives
	pingWait    = int64(5 * time.Second)        // for its answer
	idleApp     = int64(5 * time.Minute)        // idle connection to the application
	halfTime    = int64(100 * time.Millisecond) // an HTTP/1 client's end that comes this soon behind its request is part of it
	hastyTime   = int64(100 * time.Millisecond) // an end this soon behind an answer was on its way with it
	lookAfter   = int64(10 * time.Millisecond)  // a connection to the application that was idle so long is looked at before it is used
	connectTime = int64(5 * time.Second)        // delivery connect (contract 6.5)
)

// Config of an engine. The zero value is usable.
type Config struct {
	MaxLoops int              // 0: GOMAXPROCS
	MinLoops int              // open from the start, MaxLoops at most; 0: one
	Blocking reactor.Blocking // how loops wait
	Files    int              // descriptors that the process may have; 0: RLIMIT_NOFILE as it is
	Memory   int64            // bytes of memory that the process may use; 0: no limit, and nothing is shed for memory
	Used     func() uint64    // bytes in use; nil: the live heap and the stacks
	Now      func() int64     // monotonic clock; nil: the real one
	Log      *slog.Logger     // nil: discard
}

// Engine owns the loops. Make it with New; Run serves until its context ends.
type Engine struct {
	cfg   Config
	log   *slog.Logger
	mu    sync.Mutex
	loops []*Loop // guarded by mu; grows, never shrinks
	pods  map[*Pod]struct{}
	ask   chan struct{} // holds one token while Ask asks
	wg    sync.WaitGroup
	run   bool
	ctx   context.Context // ends with Run
	stop  context.CancelFunc

	draining bool         // guarded by mu: loops that are made later are told
	shut     bool         // guarded by mu, likewise
	going    atomic.Int64 // goroutines of Loop.Go
	pressure
	budget files
	files  atomic.Int64 // descriptors accounted to pods
	npods  atomic.Int64
	scarce atomic.Bool // the reserve is near: ask before accepting
}

// New makes an engine with its first loops, which start with Run.
func New(cfg Config) (*Engine, error) {
	if cfg.MaxLoops <= 0 {
		cfg.MaxLoops = runtime.GOMAXPROCS(0)
	}
	if cfg.Now == nil {
		cfg.Now = reactor.Monotonic
	}
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Used == nil {
		cfg.Used = memoryUsed
	}
	e := &Engine{cfg: cfg, log: cfg.Log, pods: map[*Pod]struct{}{}, ask: make(chan struct{}, 1), budget: newFiles(cfg.Files)}
	e.ctx, e.stop = context.WithCancel(context.Background())
	for range max(1, min(cfg.MinLoops, cfg.MaxLoops)) {
		if _, err := e.addLoop(); err != nil {
			return nil, err
		}
	}
	return e, nil
}

// addLoop makes one more loop; mu is held or nobody else knows e yet.
func (e *Engine) addLoop() (*Loop, error) {
	id := len(e.loops)
	rl, err := reactor.New(reactor.Config{
		ID: id, Blocking: e.cfg.Blocking, Now: e.cfg.Now,
		OnSlow: func(loop int, took time.Duration, stack string) {
			e.log.Warn("slow loop iteration", "loop", loop, "took", took, "stack", stack)
		},
		OnPanic: func(loop int, cause any, stack []byte) {
			e.log.Error("panic on a loop: its connection is closed", "loop", loop, "cause", fmt.Sprint(cause), "stack", string(stack))
		},
	})
	if err != nil {
		return nil, fmt.Errorf("engine: loop %d: %w", id, err)
	}
	l := &Loop{Loop: rl, eng: e, scale: 100, level: e.over.level, hops: map[*Hop]struct{}{}, apps: map[appKey]*appPool{}, nears: map[*Near]struct{}{}, draining: e.draining, shut: e.shut}
	l.dateNow = l.date
	e.loops = append(e.loops, l)
	if e.over.scale > 0 {
		l.scale = int64(e.over.scale)
	}
	if e.run {
		e.wg.Go(rl.Run)
	}
	return l, nil
}

// What the engine's ticker does.
const (
	checkEvery  = 50 * time.Millisecond // the watchdog looks at the loops
	spreadEvery = time.Second           // pods are balanced over loops
)

// Run runs the loops, the watchdog and the balancing of pods over loops until
// ctx ends; then every connection is closed and every goroutine has ended when it returns.
func (e *Engine) Run(ctx context.Context) {
	e.mu.Lock()
	e.run = true
	for _, l := range e.loops {
		e.wg.Go(l.Run)
	}
	e.mu.Unlock()
	t := time.NewTicker(checkEvery)
	defer t.Stop()
	for n := 0; ; n++ {
		select {
		case <-ctx.Done():
			e.stop() // dials under way, which are waited for below
			e.mu.Lock()
			for _, l := range e.loops {
				l.Stop()
			}
			e.mu.Unlock()
			e.wg.Wait()
			return
		case <-t.C:
			e.mu.Lock()
			for _, l := range e.loops {
				l.Check()
			}
			if n%int(measureEvery/checkEvery) == 0 {
				e.measure()
			}
			if n%int(spreadEvery/checkEvery) == 0 && n > 0 {
				e.spread(spreadEvery)
			}
			e.mu.Unlock()
		}
	}
}

// spread opens a loop when all are busy and moves pods from a saturated loop
// to it. One loop carries some 100,000 requests a second and batches best, so
// a second one is worth its wake-ups only then. mu is held.
func (e *Engine) spread(period time.Duration) {
	var idlest *Loop
	var full *Loop
	for _, l := range e.loops {
		b := l.Stats().CPU // not Busy: on a crowded machine a loop that waits for its processor is not saturated
		l.load = float64(b-l.lastCPU) / float64(period)
		l.lastCPU = b
		if idlest == nil || l.load < idlest.load {
			idlest = l
		}
		if l.load > 0.85 && (full == nil || l.load > full.load) {
			full = l
		}
	}
	if full == nil {
		return
	}
	if idlest.load > 0.5 {
		if len(e.loops) >= e.cfg.MaxLoops {
			return
		}
		l, err := e.addLoop()
		if err != nil {
			e.log.Error("cannot open another loop; going on with those there are", "err", err)
			return
		}
		idlest = l
	}
	// Half of the saturated loop's pods take their new connections to the other one.
	n := 0
	for p := range e.pods {
		if p.home.Load() == full {
			if n++; n%2 == 0 {
				p.moveTo(full, idlest)
			}
		}
	}
}

// Loops returns the loops there are.
func (e *Engine) Loops() []*Loop {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]*Loop(nil), e.loops...)
}

// AddPod gives a pod its home: the loop with the fewest pods.
func (e *Engine) AddPod(name string) *Pod {
	e.mu.Lock()
	defer e.mu.Unlock()
	count := map[*Loop]int{}
	for p := range e.pods {
		count[p.home.Load()]++
	}
	best := e.loops[0]
	for _, l := range e.loops {
		if count[l] < count[best] {
			best = l
		}
	}
	p := &Pod{Name: name, eng: e, listeners: map[int]*listener{}, shares: make([]*share, e.cfg.MaxLoops)}
	for i := range p.shares {
		p.shares[i] = &share{}
	}
	p.home.Store(best)
	e.pods[p] = struct{}{}
	e.npods.Store(int64(len(e.pods)))
	return p
}

// RemovePod stops the pod's listeners (their descriptors stay open: they
// belong to whoever opened them) and closes its connections and sessions; it
// returns when the loops have done so. Other pods are not touched.
func (e *Engine) RemovePod(p *Pod) {
	e.mu.Lock()
	delete(e.pods, p)
	e.npods.Store(int64(len(e.pods)))
	loops := append([]*Loop(nil), e.loops...)
	e.mu.Unlock()
	p.mu.Lock()
	p.gone = true
	p.mu.Unlock()
	_ = e.everywhere(context.Background(), loops, func(l *Loop) { l.dropPod(p) })
}

func (l *Loop) dropPod(p *Pod) {
	p.unlisten(l)
	for h := range l.hops {
		if h.pod == p {
			h.shut(errPodGone, exchange.Closed) // nothing is to be tried again for it
		}
	}
	for n := range l.nears {
		if n.from == p || n.to == p {
			n.shut(errPodGone, exchange.Closed)
		}
	}
	for k, a := range l.apps {
		if k.pod == p {
			a.close()
			delete(l.apps, k)
		}
	}
	l.Each(func(s reactor.Source) {
		if c, ok := s.(Owned); ok && c.Owner() == p {
			s.Fail(errPodGone)
		}
	})
}

// Files is how many descriptors are accounted to all pods. Safe for concurrent use.
func (e *Engine) Files() int64 { return e.files.Load() }

// Ask runs f on every loop and returns what it gave, and the loops that did not run it
// before ctx ended: what their goroutines are stuck in is in /debug/pprof. A loop that
// still owes an earlier answer is not asked again, so that questions do not pile up.
// Questions are asked one after the other. f must be quick: the loop serves nobody meanwhile.
// Not on a loop.
func Ask[T any](ctx context.Context, e *Engine, f func(*Loop) T) (answers []T, silent []int) {
	loops := e.Loops()
	select {
	case e.ask <- struct{}{}:
		defer func() { <-e.ask }()
	case <-ctx.Done():
		for _, l := range loops {
			silent = append(silent, l.ID())
		}
		return nil, silent
	}
	type answer struct {
		loop int
		v    T
	}
	ch := make(chan answer, len(loops))
	waiting := map[int]bool{}
	for _, l := range loops {
		if !l.asked.CompareAndSwap(false, true) {
			silent = append(silent, l.ID())
			continue
		}
		err := l.Post(func() {
			defer l.asked.Store(false) // should f panic
			v := f(l)
			l.asked.Store(false) // before Ask returns: the next question may follow at once
			ch <- answer{l.ID(), v}
		})
		if err != nil { // it has ended, and carries nothing
			l.asked.Store(false)
			continue
		}
		waiting[l.ID()] = true
	}
	for len(waiting) > 0 {
		select {
		case a := <-ch:
			delete(waiting, a.loop)
			answers = append(answers, a.v)
		case <-ctx.Done():
			for id := range waiting {
				silent = append(silent, id)
			}
			return answers, silent
		}
	}
	return answers, silent
}

// Conns tells of up to limit connections on the loop, of pod ("shop/web-1"; "": of all),
// and how many there are. On the loop.
func (l *Loop) Conns(pod string, limit int) (list []ConnState, total int) {
	l.Each(func(s reactor.Source) {
		c, ok := s.(Shown)
		if h, hop := s.(*h2conn); !ok || hop && h.hop {
			return
		}
		p := c.Owner()
		if pod != "" && p.Name != pod {
			return
		}
		if len(list) == limit {
			total++ // one that ends is counted too: it is still there
			return
		}
		st := ConnState{Pod: p.Name, Loop: l.ID()}
		if c.Show(&st) {
			total++
			list = append(list, st)
		}
	})
	return list, total
}

// Drain begins the end of every client's connection, for a process that is about
// to leave: HTTP/2 clients get GOAWAY, HTTP/1 clients "Connection: close" with
// their next answer; requests go on, and so do connections that come later, which
// are told the same, HTTP/2 ones after warnAfter. Serving tells how many are left.
// There is no way back. A loop that does not run is waited for until ctx ends.
// Safe for concurrent use.
func (e *Engine) Drain(ctx context.Context) {
	e.mu.Lock()
	e.draining = true
	loops := append([]*Loop(nil), e.loops...)
	e.mu.Unlock()
	_ = e.everywhere(ctx, loops, func(l *Loop) { // what is late is told when its loop runs
		l.draining = true
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainer); ok {
				d.drain()
			}
		})
	})
}

// Farewell ends clients' idle connections in order and names to HTTP/2 clients the
// last request that was taken; those whose handshake ends later are told that none is. Whoever calls it
// ends Run soon, which cuts the rest. A loop that does not run is waited for until ctx ends. Safe for concurrent use.
func (e *Engine) Farewell(ctx context.Context) {
	e.mu.Lock()
	e.shut = true
	loops := append([]*Loop(nil), e.loops...)
	e.mu.Unlock()
	_ = e.everywhere(ctx, loops, func(l *Loop) { // a loop that is late ends its connections when it runs, or Run cuts them
		l.shut = true
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainer); ok {
				d.farewell()
			}
		})
	})
	_ = e.everywhere(ctx, e.Loops(), func(*Loop) {}) // the iteration that wrote it is over
}

// Serving counts what clients have under way: connections, and goroutines that
// relay or shake hands. Where no connection is accepted meanwhile 0 means that
// none is left. A loop that does not answer before ctx ends counts as one. Safe for
// concurrent use.
func (e *Engine) Serving(ctx context.Context) int {
	// What moves from a goroutine to its loop is posted before the goroutine
	// counts as ended, and a loop runs what is posted in order; what moves the
	// other way is counted by the second look.
	n := int(e.going.Load())
	if n > 0 {
		return n
	}
	var mu sync.Mutex
	err := e.everywhere(ctx, e.Loops(), func(l *Loop) {
		here := 0
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainer); ok {
				if d.serves() {
					here++
				}
				return
			}
			if _, ours := s.(*h1client); ours {
				return
			}
			if _, ok := s.(Owned); ok { // a connection of which nobody knows yet what it is
				here++
			}
		})
		mu.Lock()
		n += here
		mu.Unlock()
	})
	mu.Lock()
	defer mu.Unlock()
	if err != nil {
		n++
	}
	return n + int(e.going.Load())
}

// measure takes a reading and tells the loops what changed. mu is held.
func (e *Engine) measure() {
	if e.cfg.Memory == 0 {
		return
	}
	was := e.over.level
	if !e.over.sample(e.cfg.Used(), uint64(e.cfg.Memory)) {
		return
	}
	if e.over.level != was {
		e.level.Store(uint32(e.over.level))
		e.log.Warn("memory", "level", e.over.level.String(), "was", was.String(), "limit", e.cfg.Memory)
	}
	level, scale := e.over.level, int64(e.over.scale)
	for _, l := range e.loops {
		_ = l.Post(func() { l.press(level, scale) })
	}
}

// measureEvery is how often memory is measured.
const measureEvery = time.Second
