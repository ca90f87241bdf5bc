// Package kube is a source of the mesh: the Services, routes, grants and policies of a
// Kubernetes API server, told to an input.Sink as they change.
//
//   - What objects mean is package gamma's; this one lists, watches and remembers.
//   - Nothing is said before every kind that the server has is listed.
//   - A kind whose CRD is not installed, or in no version that is read, is inert, unless
//     access would be wider without it; it comes alive when the CRD comes, and goes with it. That a kind went is believed only when its CRD is seen to be gone: an
//     error on the way takes nothing from what is known.
//   - An API server that is away changes nothing; what it last said is in force.
//   - Little is kept: objects are cut down on arrival to what the mesh needs of them.
//
// What it needs to be allowed is rbac.yaml, no more and no less.
package kube

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/metadata"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"aether/controlplane/gamma"
	"aether/controlplane/input"
	"aether/dataplane/model"
	"aether/dataplane/telemetry"
)

// Bounds and times.
const (
	// retryMin and retryMax are between tries of what failed: each waits twice as long
	// as the one before, or up to half as long, so that nodes do not come at once.
	retryMin = 250 * time.Millisecond
	retryMax = 30 * time.Second
	// maxSelected is how many Services' EndpointSlices are asked for by name; if more
	// have named target ports, all slices are watched.
	maxSelected = 100
	// unreadTries is how often a kind whose CRD is there is not found before it is taken for
	// one without a version that is read.
	unreadTries = 4
)

// Config of a Source.
type Config struct {
	REST      *rest.Config   // of the API server; required
	Namespace string         // the control plane's, whose MeshConfig counts; empty: aether-system
	Flags     input.Settings // where the MeshConfig says nothing
	Sink      input.Sink     // required
	Log       *slog.Logger   // nil: discard
}

// Source follows an API server. Make it with New. Its methods are safe for concurrent use.
type Source struct {
	sink input.Sink
	log  *slog.Logger

	core    *rest.RESTClient // core/v1 and discovery.k8s.io/v1, in protobuf
	slicer  *rest.RESTClient
	objects dynamic.Interface
	names   metadata.Interface

	// Counters, for metrics.
	Events   telemetry.Counter // objects that came, changed or went
	Lists    telemetry.Counter // whole lists that were read
	Failures telemetry.Counter // lists and watches that failed

	mu       sync.Mutex
	state    *gamma.State
	kinds    []*kind
	slices   *kind
	crds     map[string]bool // CRDs that are installed, by name
	crdsErr  string          // why they are not known; empty: they are
	crdsRead bool            // they have been read, or could not be
	selected string          // the selector of the slices that are followed; empty: none
	reselect chan struct{}   // capacity 1
	synced   bool
	reported input.Status
}

// Connect is a configuration for Config.REST: that of a kubeconfig file, or of the
// pod that the process runs in if there is none. It connects to nothing.
func Connect(kubeconfig string) (*rest.Config, error) {
	if kubeconfig == "" {
		c, err := rest.InClusterConfig()
		if err != nil {
			return nil, fmt.Errorf("kubernetes source: %w: run in a pod with a ServiceAccount, or give a kubeconfig file", err)
		}
		return c, nil
	}
	c, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubernetes source: kubeconfig %s: %w", kubeconfig, err)
	}
	return c, nil
}

// Client is a client for what needs one: rows and generated Services of the registrar.
// It connects to nothing.
func Client(kubeconfig string) (kubernetes.Interface, error) {
	c, err := Connect(kubeconfig)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(c)
	if err != nil {
		return nil, fmt.Errorf("kubernetes: %w", err)
	}
	return client, nil
}

// New makes a Source; it connects to nothing before Run.
func New(c Config) (*Source, error) {
	if c.REST == nil || c.Sink == nil {
		return nil, errors.New("kubernetes source: REST and Sink are required")
	}
	s := &Source{
		sink: c.Sink, log: cmp.Or(c.Log, slog.New(slog.DiscardHandler)),
		state: gamma.NewState(c.Namespace, c.Flags), crds: map[string]bool{}, reselect: make(chan struct{}, 1),
	}
	if err := s.connect(c.REST); err != nil {
		return nil, fmt.Errorf("kubernetes source: %w", err)
	}
	for _, k := range kinds {
		s.kinds = append(s.kinds, &kind{served: k, retry: make(chan struct{}, 1)})
	}
	s.slices = &kind{served: served{kind: gamma.KindEndpointSlice}, retry: make(chan struct{}, 1)}
	return s, nil
}

// Run follows the API server until ctx ends; it then returns nil. All its goroutines have
// ended by then.
func (s *Source) Run(ctx context.Context) error {
	var all sync.WaitGroup
	all.Go(func() { s.followCRDs(ctx) })
	all.Go(func() { s.followSlices(ctx) })
	for _, k := range s.kinds {
		all.Go(func() { s.follow(ctx, k) })
	}
	all.Wait()
	return nil
}

// Kind is how one kind of objects fares.
type Kind struct {
	Kind    string
	Version string // API version that is read; empty: none yet
	Objects int
	Listed  bool   // they have been read
	Inert   bool   // the CRD is not installed, or in no version that is read
	Err     string // why changes are not heard of at the moment; empty: they are
}

// Kinds tells how each kind fares, in a fixed order.
func (s *Source) Kinds() []Kind {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []Kind
	for _, k := range append(slices.Clone(s.kinds), s.slices) {
		out = append(out, Kind{k.kind, k.version, s.state.Count(k.kind), k.listed, k.inactive, k.err})
	}
	return out
}

// kind is what is known of the following of one kind. Source.mu guards it.
type kind struct {
	served
	retry    chan struct{} // capacity 1: try again now
	version  string
	listed   bool
	inactive bool
	misses   int // times in a row that no version was found though the CRD is there
	err      string
}

// settled: nothing is waited for before the first whole state.
func (k *kind) settled() bool { return k.listed || k.inactive }

// change makes a change to the state and tells the sink what came of it.
func (s *Source) change(f func(*gamma.State)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.state)
	s.selectLocked()
	s.publishLocked()
}

// publishLocked says what changed, or all there is once everything is read.
func (s *Source) publishLocked() {
	switch {
	case s.synced:
		if b := s.state.Take(); !b.Empty() {
			s.sink.Apply(b)
		}
	case s.readLocked():
		s.synced = true
		s.state.Take()
		b := s.state.Whole()
		s.log.Info("kubernetes: synced", "services", len(b.Services), "routes", len(b.Routes), "filters", len(b.Filters), "problems", len(b.Problems))
		s.sink.Replace(b)
	}
}

// readLocked: all that there is has been read.
func (s *Source) readLocked() bool {
	for _, k := range s.kinds {
		if !k.settled() {
			return false
		}
	}
	return len(s.state.Named()) == 0 || s.slices.settled() || s.slices.err != ""
}

// selectLocked works out which EndpointSlices are needed, and has them followed.
func (s *Source) selectLocked() {
	want := selector(s.state.Named())
	if want == s.selected {
		return
	}
	s.selected = want
	signal(s.reselect)
}

// reportLocked tells the sink how the source fares, if that changed.
func (s *Source) reportLocked() {
	var errs []string
	for _, k := range append(slices.Clone(s.kinds), s.slices) {
		if k.err != "" {
			errs = append(errs, k.kind+": "+k.err)
		} else if !k.settled() && k != s.slices {
			errs = append(errs, k.kind+": not read yet")
		}
	}
	if s.crdsErr != "" {
		errs = append(errs, kindCRD+": "+s.crdsErr)
	}
	now := input.Status{Connected: len(errs) == 0, Err: strings.Join(errs, "; ")}
	if len(errs) > 1 && same(errs) { // the server is away
		now.Err = fmt.Sprintf("%s (and so for %d kinds)", errs[0], len(errs))
	}
	if now.Connected == s.reported.Connected && now.Err == s.reported.Err {
		return
	}
	if now.Connected != s.reported.Connected || s.reported.Since.IsZero() {
		now.Since = time.Now()
	} else {
		now.Since = s.reported.Since
	}
	s.reported = now
	s.sink.Report(now)
}

// same: all errors say the same of different kinds.
func same(errs []string) bool {
	_, first, _ := strings.Cut(errs[0], ": ")
	return !slices.ContainsFunc(errs, func(e string) bool { _, why, _ := strings.Cut(e, ": "); return why != first })
}

// setStatus notes whether a request of a kind was answered as it should be.
func (s *Source) setStatus(k *kind, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	why := ""
	if err != nil {
		why = explain(k.kind, err)
		s.Failures.Inc()
		if k.err == "" {
			s.log.Warn("kubernetes: not heard of at the moment; what was last known is in force", "kind", k.kind, "reason", why)
		}
	} else if k.err != "" {
		s.log.Info("kubernetes: heard of again", "kind", k.kind)
	}
	k.err = why
	s.reportLocked()
}

// installedLocked reports whether a kind's CRD is there, and whether that is known.
func (s *Source) installedLocked(k *kind) (yes, known bool) {
	if k.crd == "" {
		return true, true
	}
	return s.crds[k.crd], s.crdsRead && s.crdsErr == ""
}

// selector selects the EndpointSlices of Services; empty: none.
func selector(of []model.ServiceName) string {
	names := map[string]bool{}
	for _, n := range of {
		names[n.Name] = true
	}
	switch {
	case len(names) == 0:
		return ""
	case len(names) > maxSelected:
		return labelService
	}
	return labelService + " in (" + strings.Join(slices.Sorted(maps.Keys(names)), ",") + ")"
}

// signal leaves a signal, if there is none yet.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
