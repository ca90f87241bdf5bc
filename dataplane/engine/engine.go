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
	"maps"
	"runtime"
	"slices"
	"sync"
	"time"

	"aether/dataplane/reactor"
)

// Engine owns the loops. Make it with New; Run serves until its context ends.
type Engine struct {
	process
	mu    sync.Mutex
	loops []*Loop // guarded by mu; grows, never shrinks
	pods  map[*Pod]struct{}
	ask   chan struct{} // holds one token while Ask asks
	run   bool
	stop  context.CancelFunc

	draining bool     // guarded by mu: loops that are made later are told
	shut     bool     // guarded by mu, likewise
	over     overload // guarded by mu: the ticker's
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
	e := &Engine{pods: map[*Pod]struct{}{}, ask: make(chan struct{}, 1)}
	e.cfg, e.log, e.budget = cfg, cfg.Log, newFiles(cfg.Files)
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
	l := &Loop{Loop: rl, proc: &e.process, scale: 100, level: e.over.level, draining: e.draining, shut: e.shut}
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
	p := &Pod{Name: name, proc: &e.process, loops: e.Loops, listeners: map[int]*listener{}, shares: make([]*share, e.cfg.MaxLoops)}
	for i := range p.shares {
		p.shares[i] = &share{resources: map[resource]struct{}{}}
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
	_ = everywhere(context.Background(), loops, func(l *Loop) { l.dropPod(p) })
}

func (l *Loop) dropPod(p *Pod) {
	p.unlisten(l)
	for _, r := range slices.Collect(maps.Keys(p.share(l).resources)) {
		r.podGone()
	}
	l.Each(func(s reactor.Source) {
		if c, ok := s.(Owned); ok && c.Owner() == p {
			s.Fail(errPodGone)
		}
	})
}

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
		if !ok {
			return
		}
		p := c.Owner()
		if pod != "" && p.Name != pod {
			return
		}
		st := ConnState{Pod: p.Name, Loop: l.ID()}
		if !c.Show(&st) {
			return
		}
		if total++; len(list) < limit {
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
	_ = everywhere(ctx, loops, func(l *Loop) { // what is late is told when its loop runs
		l.draining = true
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainable); ok {
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
	_ = everywhere(ctx, loops, func(l *Loop) { // a loop that is late ends its connections when it runs, or Run cuts them
		l.shut = true
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainable); ok {
				d.farewell()
			}
		})
	})
	_ = everywhere(ctx, e.Loops(), func(*Loop) {}) // the iteration that wrote it is over
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
	err := everywhere(ctx, e.Loops(), func(l *Loop) {
		here := 0
		l.Each(func(s reactor.Source) {
			if d, ok := s.(drainable); ok {
				if d.serves() {
					here++
				}
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
