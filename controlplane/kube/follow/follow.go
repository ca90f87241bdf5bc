// Package follow tells what there is of a kind of Kubernetes' objects, and what becomes
// of it, for as long as one wants to know.
//
//   - First all there is, then changes in order; after an interruption that hides some,
//     all there is again. The API server is asked again by itself, after a wait of 0.8 to
//     30 s with jitter that grows with each failure, and begins anew after two minutes without one.
//   - Of an object only what the caller makes of it is kept, and not for longer than it takes to hand it over.
//   - What happens to the connection is told, not logged.
//
// It knows nothing of what the objects mean.
package follow

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/wait"
	kubewatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

// retryMin and retryMax are between tries of what failed, the jitter included.
const (
	retryMin = 800 * time.Millisecond
	retryMax = 30 * time.Second
)

// Kind is a kind of objects, and how to ask for them.
type Kind struct {
	Name    string         // for errors: "pods"
	Example runtime.Object // of the type that List and Watch give
	List    func(context.Context, metav1.ListOptions) (runtime.Object, error)
	Watch   func(context.Context, metav1.ListOptions) (kubewatch.Interface, error)
	// Retry is the wait between tries of what failed; the zero value: 0.8 to 30 s.
	Retry wait.Backoff
}

// Op is what News says of its objects.
type Op uint8

// The operations.
const (
	Changed       Op = iota + 1 // they are there, or have changed
	Removed                     // they are not there any more
	Replaced                    // they are all there are
	StatusChanged               // nothing but how it fares: Err
)

// Event is what is told. Version is the resource version after it.
type Event[O any] struct {
	Op      Op
	Objects []O
	Version string
	// Err of Fared says why the kind is not followed; nil: the API server answers.
	Err error
}

// Objects follows a kind until ctx ends. keep makes what is kept of an object: it
// must have its namespace, name and resource version. tell is called from
// goroutines of Objects, one after the other, and may block, which holds up what comes
// after; it is not called once Objects has returned.
func Objects[O metav1.Object](ctx context.Context, k Kind, keep func(runtime.Object) O, tell func(Event[O])) {
	f := &follower[O]{ctx: ctx, reduce: keep, notify: tell}
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			r, err := k.List(ctx, o)
			f.reportStatus("list "+k.Name, err)
			return r, err
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (kubewatch.Interface, error) {
			w, err := k.Watch(ctx, o)
			f.reportStatus("watch "+k.Name, err)
			return w, err
		},
	}
	quiet := klog.New(nil) // the client's own lines would say again what is told
	retry := k.Retry
	if retry == (wait.Backoff{}) { // the client's own ends at 60 s
		retry = wait.Backoff{Duration: retryMin, Factor: 2, Jitter: 1, Cap: retryMax / 2, Steps: 8} // up to twice that
	}
	r := cache.NewReflectorWithOptions(lw, k.Example, f, cache.ReflectorOptions{Logger: &quiet, Name: k.Name, Backoff: &retry, Clock: Clock(ctx)})
	r.RunWithContext(klog.NewContext(ctx, quiet))
}

// Clock is the real one, but that a wait for After ends with ctx: between two tries of a
// streamed listing the client's reflector waits for nothing else, up to its longest
// backoff. For ReflectorOptions.
func Clock(ctx context.Context) clock.Clock { return endingClock{ctx: ctx} }

type endingClock struct {
	clock.RealClock
	ctx context.Context
}

// After is a clock.Clock's.
func (c endingClock) After(d time.Duration) <-chan time.Time {
	over := make(chan time.Time, 1)
	ctx, cancel := context.WithTimeout(c.ctx, d)
	context.AfterFunc(ctx, func() {
		cancel()
		over <- time.Now()
	})
	return over
}

// follower is what the client's reflector fills: a cache.ReflectorStore that keeps nothing.
type follower[O metav1.Object] struct {
	ctx    context.Context
	reduce func(runtime.Object) O
	notify func(Event[O])
}

func (f *follower[O]) reportStatus(what string, err error) {
	if f.ctx.Err() != nil {
		return // it is the caller who ended it
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", what, err)
	}
	f.notify(Event[O]{Op: StatusChanged, Err: err})
}

// take gives what is kept of an object, which may have been taken already.
func (f *follower[O]) take(o any) (O, error) {
	if k, ok := o.(O); ok {
		return k, nil
	}
	r, ok := o.(runtime.Object)
	if !ok {
		var none O
		return none, fmt.Errorf("%T is no object of Kubernetes", o)
	}
	return f.reduce(r), nil
}

// Transformer strips objects while a listing streams in (cache.TransformingStore).
func (f *follower[O]) Transformer() cache.TransformFunc {
	return func(o any) (any, error) { return f.take(o) }
}

// Add is a cache.ReflectorStore's.
func (f *follower[O]) Add(o any) error { return f.one(Changed, o) }

// Update is a cache.ReflectorStore's.
func (f *follower[O]) Update(o any) error { return f.one(Changed, o) }

// Delete is a cache.ReflectorStore's.
func (f *follower[O]) Delete(o any) error { return f.one(Removed, o) }

// Resync is a cache.ReflectorStore's: there is nothing to do.
func (f *follower[O]) Resync() error { return nil }

func (f *follower[O]) one(op Op, o any) error {
	k, err := f.take(o)
	if err == nil {
		f.notify(Event[O]{Op: op, Objects: []O{k}, Version: k.GetResourceVersion()})
	}
	return err
}

// Replace is a cache.ReflectorStore's.
func (f *follower[O]) Replace(all []any, version string) error {
	n := Event[O]{Op: Replaced, Objects: make([]O, len(all)), Version: version}
	for i, o := range all {
		k, err := f.take(o)
		if err != nil {
			return err
		}
		n.Objects[i] = k
	}
	f.notify(n)
	return nil
}
