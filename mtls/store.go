package mtls

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"
)

// Back-off between two Watch calls of a Source that returned early (contract 12).
const (
	minBackoff = time.Second
	maxBackoff = 30 * time.Second
)

// Config of a Store.
type Config struct {
	Source Source           // required
	Now    func() time.Time // nil: time.Now

	// Changed is told of each SVID that came into force for a pod (s is not nil),
	// and of each thing that went wrong (err is not nil; the last good SVID stays
	// in force). Calls for one pod are not concurrent, those of different pods are.
	// It must not block and not call the Store. nil: nobody is told.
	Changed func(r Ref, s *SVID, err error)
}

// Store keeps the current SVID of each pod of the node. It holds no identity it
// was not asked for: an SVID whose ID is not the expected one is refused.
// Safe for concurrent use.
type Store struct {
	src     Source
	now     func() time.Time
	changed func(Ref, *SVID, error)

	mu   sync.RWMutex
	pods map[string]*entry // by container
	ctx  context.Context   // of Run; nil: not running
	wg   sync.WaitGroup    // watches; added to only while ctx is set
}

type entry struct {
	ref    Ref
	mu     sync.Mutex  // held while Config.Changed runs, and never waited for with Store.mu held
	ends   *time.Timer // of the next authority of svid's that ends; guarded by mu
	svid   atomic.Pointer[SVID]
	since  atomic.Int64 // when svid came, in nanoseconds of Unix time
	failed atomic.Pointer[Failure]
	cancel context.CancelFunc // set once watched
}

// NewStore returns a Store that watches nothing until Run.
func NewStore(c Config) *Store {
	s := &Store{src: c.Source, now: clock(c.Now), changed: c.Changed, pods: map[string]*entry{}}
	if s.changed == nil {
		s.changed = func(Ref, *SVID, error) {}
	}
	return s
}

// Run watches the Source for every pod added, until ctx ends; then every watch
// has ended when it returns, and SVIDs already here stay readable. It is an error
// to run a Store that runs.
func (s *Store) Run(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	s.mu.Lock()
	if s.ctx != nil {
		s.mu.Unlock()
		return errors.New("mtls: the certificate store runs already")
	}
	s.ctx = ctx
	for _, e := range s.pods {
		s.watchLocked(e)
	}
	s.mu.Unlock()

	<-ctx.Done()
	s.mu.Lock()
	s.ctx = nil
	s.mu.Unlock()
	s.wg.Wait()
	return nil
}

// Add begins to keep the identity of a pod. Adding it again unchanged does
// nothing; adding it with another Ref forgets what is there first.
func (s *Store) Add(r Ref) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.pods[r.Container]; old != nil {
		if old.ref == r {
			return
		}
		old.end()
	}
	e := &entry{ref: r}
	s.pods[r.Container] = e
	if s.ctx != nil {
		s.watchLocked(e)
	}
}

// Remove forgets the pod's identity at once; Current then answers nil.
func (s *Store) Remove(container string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.pods[container]; e != nil {
		e.end()
		delete(s.pods, container)
	}
}

// Current returns the pod's SVID. nil: the pod is unknown, has none yet, or its
// SVID has expired; then nothing may be dialled or accepted for it.
func (s *Store) Current(container string) *SVID {
	s.mu.RLock()
	e := s.pods[container]
	s.mu.RUnlock()
	if e == nil {
		return nil
	}
	v := e.svid.Load()
	if v == nil || !s.now().Before(v.NotAfter) {
		return nil
	}
	return v
}

// Held is what a Store has of one pod, for whoever shows it.
type Held struct {
	Ref   Ref
	SVID  *SVID     // the last one, which may have expired; nil: none has come yet
	Since time.Time // when it came; zero: none has
	// Failure is why no other came since, as the source said last; nil: nothing went wrong.
	Failure *Failure
}

// Failure is what went wrong with a pod's identity. It does not change.
type Failure struct {
	Err   error
	Since time.Time // when something went wrong first, after the last good SVID
}

// Held tells of every pod, in no order. Safe for concurrent use.
func (s *Store) Held() []Held {
	s.mu.RLock()
	defer s.mu.RUnlock()
	out := make([]Held, 0, len(s.pods))
	for _, e := range s.pods {
		h := Held{Ref: e.ref, SVID: e.svid.Load(), Failure: e.failed.Load()}
		if h.SVID != nil {
			h.Since = time.Unix(0, e.since.Load())
		}
		out = append(out, h)
	}
	return out
}

func (e *entry) end() {
	if e.cancel != nil {
		e.cancel()
	}
}

func (s *Store) watchLocked(e *entry) {
	ctx, cancel := context.WithCancel(s.ctx)
	e.cancel = cancel
	s.wg.Go(func() {
		defer cancel()
		s.watch(ctx, e)
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.ends != nil {
			e.ends.Stop()
		}
	})
}

// watch keeps one Watch of the source going until ctx ends.
func (s *Store) watch(ctx context.Context, e *entry) {
	wait := minBackoff
	for {
		err := s.src.Watch(ctx, e.ref, func(v *SVID, err error) {
			if s.take(ctx, e, v, err) {
				wait = minBackoff
			}
		})
		if ctx.Err() != nil {
			return
		}
		e.mu.Lock()
		s.failLocked(e, fmt.Errorf("the source ended: %w", cmp.Or(err, errors.New("no reason given"))))
		e.mu.Unlock()
		t := time.NewTimer(wait/2 + rand.N(wait/2+1)) // jitter: all pods' streams broke at once
		select {
		case <-ctx.Done():
			t.Stop()
			return
		case <-t.C:
		}
		wait = min(2*wait, maxBackoff)
	}
}

// take puts v in force, or says why not; it reports whether it did.
func (s *Store) take(ctx context.Context, e *entry, v *SVID, err error) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if ctx.Err() != nil { // removed or replaced meanwhile
		return false
	}
	switch {
	case err != nil:
	case v == nil:
		err = errors.New("the source gave neither certificate nor error")
	case v.ID != e.ref.ID:
		err = &WrongPeer{Want: e.ref.ID, Got: v.ID}
		err = fmt.Errorf("the source gave another one: %w", err)
	case !s.now().Before(v.NotAfter):
		err = fmt.Errorf("the source gave a certificate of %s that expired at %s", v.ID, v.NotAfter.UTC().Format(time.RFC3339))
	}
	if err != nil {
		s.failLocked(e, err)
		return false
	}
	e.since.Store(s.now().UnixNano())
	e.failed.Store(nil)
	s.putLocked(ctx, e, v)
	return true
}

// putLocked puts v in force, without the authorities that have ended, and again when the next of them ends: what was
// verified by it is to be judged again.
func (s *Store) putLocked(ctx context.Context, e *entry, v *SVID) {
	if e.ends != nil {
		e.ends.Stop()
		e.ends = nil
	}
	now := s.now()
	v, next := v.at(now)
	if !next.IsZero() {
		var t *time.Timer
		t = time.AfterFunc(next.Sub(now), func() {
			e.mu.Lock()
			defer e.mu.Unlock()
			if ctx.Err() == nil && e.ends == t {
				s.putLocked(ctx, e, v)
			}
		})
		e.ends = t
	}
	e.svid.Store(v)
	s.changed(e.ref, v, nil)
}

// failLocked keeps why e has no other SVID, and calls Config.Changed with it.
func (s *Store) failLocked(e *entry, err error) {
	err = fmt.Errorf("mtls: identity of %s/%s: %w", e.ref.Namespace, e.ref.Account, err)
	f := &Failure{Err: err, Since: s.now()}
	if was := e.failed.Load(); was != nil {
		f.Since = was.Since
	}
	e.failed.Store(f)
	s.changed(e.ref, nil, err)
}
