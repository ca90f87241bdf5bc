package services

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	kubewatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/util/flowcontrol"

	"aether/controlplane/kube/follow"
	"aether/dataplane/model"
)

const (
	// writesPerSecond and writeBurst bound what the API server is asked for: everything
	// that changes something, but Events.
	writesPerSecond = 50
	writeBurst      = 100
	// eventsPerSecond and eventBurst bound Events, which are written while there is nothing
	// else to write; maxEvents wait for that.
	eventsPerSecond = 10
	eventBurst      = 20
	maxEvents       = 1024
	// callTime bounds one call to the API server.
	callTime = 10 * time.Second
	// quiet is how long changes of rows are gathered before the rows are read.
	quiet = 200 * time.Millisecond
	// readShare bounds what reading the rows costs: at most so large a part of the time.
	readShare = 50
	// mostBackoff bounds the wait after failures; the first is Config.Interval. It is
	// longer, farBackoff, where only somebody's change of mind can help: a namespace that
	// is not in this cluster, a name that no Service can have.
	mostBackoff = 30 * time.Second
	farBackoff  = 5 * time.Minute
	// forgive is for how long a Service has to be left alone until a change of it is put
	// right at once again. Sooner, each is after twice the wait of the one before it, at
	// most mostBackoff: whoever else writes it is not fought.
	forgive = 5 * time.Minute
	// eventEvery is how often an Event that still holds is written again; Kubernetes
	// forgets Events after an hour.
	eventEvery = 30 * time.Minute
	// A prune of more Services than massPrune, and than massShare percent of all, is held
	// back until Config.MassPruneAfter.
	massPrune = 2
	massShare = 30
)

// live is what is known of a Service that exists.
type live struct {
	metav1.ObjectMeta // namespace, name, version
	uid               types.UID
	generated         bool
	service           string // the annotation
	retired           []string
	cluster           bool // of type ClusterIP
	selector          bool
	ports             []port
}

// retired are annotations of older releases (contract 1.6).
var retired = []string{"aether.io/app-protocol", "aether.io/port"}

func liveOf(o runtime.Object) *live {
	s := o.(*corev1.Service)
	l := &live{
		ObjectMeta: metav1.ObjectMeta{Namespace: s.Namespace, Name: s.Name, ResourceVersion: s.ResourceVersion},
		uid:        s.UID, generated: s.Labels[Label] == "true",
	}
	if !l.generated {
		return l // a user's: that it is there is all that matters
	}
	l.service, l.cluster, l.selector = s.Annotations[Annotation], s.Spec.Type == corev1.ServiceTypeClusterIP, len(s.Spec.Selector) > 0
	l.ports = portsOf(s)
	for _, a := range retired {
		if _, ok := s.Annotations[a]; ok {
			l.retired = append(l.retired, a)
		}
	}
	return l
}

func (l *live) key() model.ServiceName {
	return model.ServiceName{Namespace: l.Namespace, Name: l.Name}
}

// is reports whether l is as it should be.
func (l *live) is(s spec) bool {
	return l.service == l.Name && l.cluster && !l.selector && len(l.retired) == 0 && slices.Equal(l.ports, s.ports)
}

// keeper is the work of one term of leading. It belongs to one goroutine.
type keeper struct {
	*Generator
	limit flowcontrol.RateLimiter
	talk  flowcontrol.RateLimiter // of Events

	live   map[model.ServiceName]*live
	listed bool
	want   map[model.ServiceName]spec
	read   bool // rows have been, once

	queue  []model.ServiceName // to look at
	queued map[model.ServiceName]bool
	absent map[model.ServiceName]time.Time // generated Services without rows, since when
	failed map[model.ServiceName]*failure
	calm   map[model.ServiceName]*pace // Services that were put right
	told   map[model.ServiceName]told
	events []*corev1.Event // to be written
	room   int             // for them: maxEvents, but for tests
	warned map[model.ServiceName]string
	fate   string // why Services are not followed
	held   int    // what was said of prunes that are held back
}

// failure is what came of the last attempt at a Service.
type failure struct {
	why   string
	wait  time.Duration
	until time.Time
}

// pace is how often a Service is put right.
type pace struct {
	wait time.Duration
	last time.Time
}

// told is an Event that has been written.
type told struct {
	uid types.UID
	at  time.Time
}

func newKeeper(g *Generator) *keeper {
	return &keeper{
		Generator: g, limit: flowcontrol.NewTokenBucketRateLimiter(writesPerSecond, writeBurst),
		room: maxEvents,
		talk: flowcontrol.NewTokenBucketRateLimiter(eventsPerSecond, eventBurst),
		live: map[model.ServiceName]*live{}, want: map[model.ServiceName]spec{}, queued: map[model.ServiceName]bool{},
		absent: map[model.ServiceName]time.Time{}, failed: map[model.ServiceName]*failure{},
		calm: map[model.ServiceName]*pace{}, told: map[model.ServiceName]told{}, warned: map[model.ServiceName]string{},
	}
}

// run works until ctx ends.
func (k *keeper) run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	news := make(chan follow.Event[*live])
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		follow.Objects(ctx, k.kind(), liveOf, func(n follow.Event[*live]) {
			select {
			case news <- n:
			case <-ctx.Done():
			}
		})
	}()
	defer func() {
		cancel()
		<-ended
	}()

	changed, end := k.cfg.Rows.Changed()
	defer end()
	synced := k.cfg.Rows.Synced()
	tick := time.NewTicker(k.cfg.Interval)
	defer tick.Stop()
	var due <-chan time.Time // the rows are to be read then; nil: they have not changed
	var next time.Time       // not before this
	always := make(chan struct{})
	close(always)
	for {
		var work <-chan struct{}
		if len(k.queue)+len(k.events) > 0 {
			work = always
		}
		select {
		case <-ctx.Done():
			return
		case n := <-news:
			k.hear(n)
		case <-synced:
			synced = nil
			due = time.After(0)
		case <-changed:
			if due == nil && synced == nil {
				due = time.After(max(quiet, time.Until(next)))
			}
		case <-due:
			due = nil
			start := time.Now()
			k.readRows()
			next = time.Now().Add(readShare * time.Since(start))
		case <-tick.C:
			k.lookAtAll()
		case <-work:
			k.step(ctx)
		}
	}
}

// kind is all Services: of those that are not generated, names are kept.
func (k *keeper) kind() follow.Kind {
	c := k.cfg.Client.CoreV1().Services(metav1.NamespaceAll)
	return follow.Kind{
		Name: "services", Example: &corev1.Service{},
		List:  func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) { return c.List(ctx, o) },
		Watch: func(ctx context.Context, o metav1.ListOptions) (kubewatch.Interface, error) { return c.Watch(ctx, o) },
	}
}

// hear takes what is said of Services that exist.
func (k *keeper) hear(n follow.Event[*live]) {
	if n.Op == follow.StatusChanged {
		why := ""
		if n.Err != nil {
			why = n.Err.Error()
		}
		if why != k.fate && why != "" {
			k.cfg.Log.Warn("Services cannot be followed: none is written meanwhile", "err", n.Err)
		}
		k.fate = why
		return
	}
	seen := make(map[model.ServiceName]bool, len(n.Objects))
	for _, l := range n.Objects {
		key := l.key()
		seen[key] = true
		switch n.Op {
		case follow.Removed:
			k.gone(key)
		case follow.Replaced: // also by older versions: the server may have been set back
			k.live[key] = l
			k.lookAt(key)
		default:
			k.know(l)
		}
	}
	if n.Op == follow.Replaced {
		for key := range k.live {
			if !seen[key] {
				k.gone(key)
			}
		}
		if !k.listed {
			k.listed = true
			k.lookAtAll()
		}
	}
}

// know takes a Service as it is now, unless more is known already from the answer to a write.
func (k *keeper) know(l *live) {
	key := l.key()
	if old := k.live[key]; old == nil || old.uid != l.uid || newer(l.ResourceVersion, old.ResourceVersion) {
		k.live[key] = l
		k.lookAt(key)
	}
}

func (k *keeper) gone(key model.ServiceName) {
	delete(k.live, key)
	delete(k.absent, key)
	delete(k.told, key)
	k.lookAt(key)
}

// newer compares resource versions, which are numbers that grow.
func newer(a, b string) bool {
	x, errX := strconv.ParseUint(a, 10, 64)
	y, errY := strconv.ParseUint(b, 10, 64)
	return errX != nil || errY != nil || x > y
}

// readRows reads what Services there should be.
func (k *keeper) readRows() {
	want := make(map[model.ServiceName]spec, len(k.want))
	for name, rows := range k.cfg.Rows.Services() {
		s := specOf(rows)
		want[name] = s
		delete(k.absent, name)
		if old, ok := k.want[name]; !ok || !slices.Equal(old.ports, s.ports) {
			delete(k.calm, name) // it is we who want something else
			k.lookAt(name)
		}
		if s.warning != k.warned[name] {
			k.warned[name] = s.warning
			if s.warning == "" {
				delete(k.warned, name)
			} else {
				k.cfg.Log.Warn("the generated Service is not all that its rows say", "service", name.String(), "reason", s.warning)
			}
		}
	}
	for name := range k.want {
		if _, ok := want[name]; !ok {
			k.lookAt(name)
			delete(k.warned, name)
			delete(k.failed, name)
			delete(k.calm, name)
			delete(k.told, name)
		}
	}
	k.want = want
	if !k.read {
		k.read = true
		k.lookAtAll()
	}
}

func (k *keeper) lookAt(name model.ServiceName) {
	if !k.queued[name] {
		k.queued[name] = true
		k.queue = append(k.queue, name)
	}
}

// lookAtAll looks at everything again: what failed, what is missing, what may go.
func (k *keeper) lookAtAll() {
	if !k.read || !k.listed {
		return
	}
	for name, s := range k.want {
		if l := k.live[name]; l == nil || !l.generated || !l.is(s) {
			k.lookAt(name)
		}
	}
	generated, users := 0, 0
	now := time.Now()
	old, oldest := 0, 0 // without rows for PruneAfter, and for MassPruneAfter
	for name, l := range k.live {
		_, wanted := k.want[name]
		switch {
		case !l.generated && wanted:
			users++
		case !l.generated:
		default:
			generated++
			if wanted {
				delete(k.absent, name)
				continue
			}
			since, ok := k.absent[name]
			if !ok {
				since = now
				k.absent[name] = now
			}
			if now.Sub(since) >= k.cfg.PruneAfter {
				old++
			}
			if now.Sub(since) >= k.cfg.MassPruneAfter {
				oldest++
			}
		}
	}
	k.services.Store(int64(generated))
	k.users.Store(int64(users))
	k.prune(now, generated, old, oldest)
}

// prune queues the Services that may go.
func (k *keeper) prune(now time.Time, generated, old, oldest int) {
	after, held := k.cfg.PruneAfter, 0
	switch {
	case old == 0:
	case len(k.want) == 0:
		held = old
	case old > massPrune && old*100 > generated*massShare:
		after, held = max(after, k.cfg.MassPruneAfter), old-oldest
	}
	k.Generator.held.Store(int64(held))
	if held > 0 && held != k.held {
		why := fmt.Sprintf("they are many of %d: they go once that has been so for %s", generated, k.cfg.MassPruneAfter)
		if len(k.want) == 0 {
			why = "no service has rows: an empty registry is taken for a failure"
		}
		k.cfg.Log.Warn("generated Services of services without rows are kept", "services", held, "reason", why)
	}
	k.held = held
	if len(k.want) == 0 {
		return
	}
	for name, since := range k.absent {
		if now.Sub(since) >= after {
			k.lookAt(name)
		}
	}
}

// step does the next of what is to be done, and reports whether there was anything: Events
// come last, for a Service that is missing is worse than one that is not explained.
func (k *keeper) step(ctx context.Context) bool {
	switch {
	case len(k.queue) > 0:
		k.one(ctx)
	case len(k.events) > 0:
		k.say(ctx)
	default:
		return false
	}
	return true
}

// one looks at the first name of the queue, and does what is to be done about it.
func (k *keeper) one(ctx context.Context) {
	name := k.queue[0]
	k.queue = k.queue[1:]
	if len(k.queue) == 0 {
		k.queue = nil // what has been looked at is not kept
	}
	delete(k.queued, name)
	if !k.read || !k.listed {
		return
	}
	now := time.Now()
	if f := k.failed[name]; f != nil && now.Before(f.until) {
		return // lookAtAll comes to it again
	}
	s, wanted := k.want[name]
	l := k.live[name]
	var err error
	switch {
	case wanted && l == nil:
		err = k.create(ctx, name, s)
	case wanted && !l.generated:
		k.tellUser(l)
	case wanted && !l.is(s):
		if !k.mayRight(name, now) {
			return // lookAtAll comes to it again
		}
		err = k.converge(ctx, l, s)
	case !wanted && l != nil && l.generated && k.mayGo(name, now):
		err = k.remove(ctx, l)
	}
	k.came(ctx, name, err)
}

// mayRight reports whether a Service is put right now, and paces that.
func (k *keeper) mayRight(name model.ServiceName, now time.Time) bool {
	p := k.calm[name]
	switch {
	case p == nil:
		k.calm[name] = &pace{wait: k.cfg.Interval, last: now}
		return true
	case now.Sub(p.last) < p.wait:
		return false
	case now.Sub(p.last) < forgive:
		p.wait = min(2*p.wait, max(mostBackoff, k.cfg.Interval))
	default:
		p.wait = k.cfg.Interval
	}
	p.last = now
	return true
}

// mayGo reports whether a Service without rows goes: prune has queued it.
func (k *keeper) mayGo(name model.ServiceName, now time.Time) bool {
	since, ok := k.absent[name]
	if !ok || len(k.want) == 0 {
		return false
	}
	after := k.cfg.PruneAfter
	if k.held > 0 {
		after = max(after, k.cfg.MassPruneAfter)
	}
	return now.Sub(since) >= after
}

// came notes what came of an attempt.
func (k *keeper) came(ctx context.Context, name model.ServiceName, err error) {
	f := k.failed[name]
	switch {
	case ctx.Err() != nil:
	case err == nil && f != nil:
		delete(k.failed, name)
		k.cfg.Log.Info("the generated Service is in order again", "service", name.String())
	case err == nil:
	default:
		k.Generator.failed.Inc()
		most := mostBackoff
		if apierrors.IsNotFound(err) || apierrors.IsInvalid(err) {
			most = farBackoff
		}
		if f == nil {
			f = &failure{wait: k.cfg.Interval}
			k.failed[name] = f
		} else {
			f.wait = min(2*f.wait, max(most, k.cfg.Interval))
		}
		f.until = time.Now().Add(f.wait/2 + rand.N(f.wait/2+1))
		if why := reasonOf(err); why != f.why { // once a cause
			f.why = why
			k.cfg.Log.Warn("the generated Service cannot be written", "service", name.String(), "err", err)
		}
	}
}

// reasonOf is what tells causes apart: of an answer its kind, for its text may differ each time.
func reasonOf(err error) string {
	if r := apierrors.ReasonForError(err); r != metav1.StatusReasonUnknown {
		return string(r)
	}
	return err.Error()
}
