package kube_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"aether/controlplane/input"
	"aether/controlplane/kube"
	"aether/dataplane/model"
)

// patience is how long a change may take to arrive: the machine may be busy.
const patience = 90 * time.Second

// sink adds up what a source says.
type sink struct {
	mu       sync.Mutex
	sum      input.Batch
	replaced int
	status   input.Status
	changed  chan struct{} // closed and replaced at each change
	bad      string        // what a source may not do
}

func newSink() *sink { return &sink{changed: make(chan struct{}), sum: empty()} }

func empty() input.Batch {
	return input.Batch{Tables: input.Tables{Services: map[model.ServiceName][]model.Service{}, Routes: map[input.RouteKey][]model.Route{}, Filters: map[model.ServiceName][]model.HTTPFilter{}, Policies: map[model.ServiceName][]model.EndpointPolicy{}, Problems: map[string][]model.Problem{}, Namespaces: map[string][]input.Override{}}}
}

func (s *sink) Replace(b input.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	settings := s.sum.Settings
	s.sum = empty()
	s.sum.Settings = settings
	s.addLocked(b)
	s.replaced++
}

func (s *sink) Apply(b input.Batch) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.replaced == 0 {
		s.bad = "it applied a change before it was synced"
	}
	s.addLocked(b)
}

func (s *sink) addLocked(b input.Batch) {
	merge(s.sum.Services, b.Services)
	merge(s.sum.Routes, b.Routes)
	merge(s.sum.Filters, b.Filters)
	merge(s.sum.Policies, b.Policies)
	merge(s.sum.Problems, b.Problems)
	merge(s.sum.Namespaces, b.Namespaces)
	if b.Settings != nil {
		s.sum.Settings = b.Settings
	}
	if len(b.Endpoints)+len(b.Catalog)+len(b.Workloads) > 0 {
		s.bad = "it spoke of what is the registry's"
	}
	s.signalLocked()
}

func (s *sink) Report(st input.Status) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = st
	s.signalLocked()
}

func (s *sink) signalLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

func merge[K comparable, V any](to, from map[K][]V) {
	for k, v := range from {
		if to[k] = v; len(v) == 0 {
			delete(to, k)
		}
	}
}

// wait waits until why says nothing any more; it is called with what the sink has.
func (s *sink) wait(t *testing.T, what string, why func(b *input.Batch, st input.Status) string) {
	t.Helper()
	end := time.After(patience)
	for {
		s.mu.Lock()
		said, bad, changed := "", s.bad, s.changed
		if s.replaced == 0 {
			said = "not synced: " + s.status.Err
		} else {
			said = why(&s.sum, s.status)
		}
		s.mu.Unlock()
		switch {
		case bad != "":
			t.Fatalf("%s: %s", what, bad)
		case said == "":
			return
		}
		select {
		case <-changed:
		case <-end:
			t.Fatalf("%s: still %s", what, said)
		}
	}
}

// run runs a source until the test ends, and fails it if the source does not end then.
func run(t *testing.T, c *rest.Config, namespace string) (*kube.Source, *sink) {
	t.Helper()
	to := newSink()
	src, err := kube.New(kube.Config{REST: c, Namespace: namespace, Flags: input.Settings{AccessLogSuccess: 100}, Sink: to})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- src.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("the source does not end")
		}
	})
	return src, to
}

func kindOf(src *kube.Source, name string) kube.Kind {
	i := slices.IndexFunc(src.Kinds(), func(k kube.Kind) bool { return k.Kind == name })
	return src.Kinds()[i]
}

// gone says what is still there.
func gone[T any](list []T) string {
	if len(list) == 0 {
		return ""
	}
	return fmt.Sprintf("%+v", list)
}

func ownCRDs(t *testing.T) []string {
	files, err := filepath.Glob("crd/*.yaml")
	if err != nil || len(files) != 3 {
		t.Fatal(files, err)
	}
	return files
}
