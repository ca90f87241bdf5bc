package file

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"aether/dataplane/model"
)

// Times of a Watch.
const (
	quiet   = 100 * time.Millisecond // without a change before the directory is read
	holdMax = time.Second            // from the first change, however many follow
	rescan  = 30 * time.Second       // for what no event tells: network file systems, a parent that went
)

// Watch reads dir and calls on with the result, then again after every change
// that makes a difference, until ctx ends; it then returns nil. Its error means that
// dir could not be read at the start, or not be watched at all.
//
// Changes are held off until there have been none for 100 ms, 1 s at most.
// A directory that goes away keeps the mesh it last gave, with a problem that says so.
// on is called on the caller's goroutine, and what it is given is its own to keep,
// but shares memory with what it was given before: it may not be changed.
func Watch(ctx context.Context, dir string, o Options, on func(*model.Mesh, []model.Problem)) error {
	return observe(ctx, dir, o, func(s *source, problems []model.Problem) { on(s.mesh, problems) })
}

// observe is Watch that also tells on which pods are this node's, where another leads their
// lives, what the MeshConfigs say, and why the directory cannot be read at the moment.
func observe(ctx context.Context, dir string, o Options, on func(*source, []model.Problem)) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return fmt.Errorf("configuration directory: %w", err)
	}
	n, err := newNotifier(dir)
	if err != nil {
		return fmt.Errorf("watch configuration directory %s: %w: check that its parent exists, and fs.inotify.max_user_instances", dir, err)
	}
	defer n.close()
	s := source{loader: newLoader(dir, o), visit: n.add, sweep: n.sweep, on: on}
	if o.Before != nil {
		s.before = o.Before(ctx)
	}
	if s.read(ctx) != nil {
		return nil // told to stop before it began
	}
	if s.err != nil {
		return fmt.Errorf("configuration directory %s: %w: make it a directory that this process may list", dir, s.err)
	}
	s.publish()
	s.follow(ctx, n.changed)
	return nil
}

// source reads, and publishes what differs from what it published before.
type source struct {
	*loader
	visit func(string) error
	sweep func() // ends a read: drops the watches that it did not visit
	on    func(s *source, problems []model.Problem)

	mesh     *model.Mesh // last good one
	configs  meshConfigs
	pods     []Pod
	problems []model.Problem
	err      error // why dir could not be read the last time
	stale    bool  // loader says more than mesh does
	told     []model.Problem
	toldMesh *model.Mesh
	toldConf meshConfigs
	toldPods []Pod
	toldAll  bool // whole, as told
}

// read brings the loader up to date. Its error is ctx's.
func (s *source) read(ctx context.Context) error {
	changed, err := s.loader.read(ctx, s.visit)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	s.err = err
	s.stale = s.stale || changed
	if err == nil {
		s.sweep()
	}
	return nil
}

func (s *source) publish() {
	if s.stale || s.mesh == nil {
		v := s.views()
		s.mesh, s.problems = v.Mesh(s.o.Node)
		s.configs = v.configs
		s.pods = v.local(s.mesh)
		s.stale = false
	}
	problems := s.problems
	if s.err != nil {
		p := dirProblem(s.dir, s.err)
		p.Reason += "; what it last said is in force"
		problems = append([]model.Problem{p}, problems...)
	}
	if s.toldMesh != nil && reflect.DeepEqual(s.mesh, s.toldMesh) && reflect.DeepEqual(problems, s.told) && reflect.DeepEqual(s.pods, s.toldPods) && reflect.DeepEqual(s.configs, s.toldConf) && s.whole == s.toldAll {
		return
	}
	s.toldMesh, s.toldPods, s.toldConf, s.told, s.toldAll = s.mesh, s.pods, s.configs, problems, s.whole
	s.on(s, problems)
}

// follow reads and publishes after each change until ctx ends.
func (s *source) follow(ctx context.Context, changed <-chan struct{}) {
	again := time.NewTicker(rescan)
	defer again.Stop()
	for {
		// A change; or the time to look whether there was one that nobody told.
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-again.C:
		}
		end := time.NewTimer(holdMax)
		for late := false; ; {
			calm := time.NewTimer(quiet)
			// More changes; none for a while; or changes for too long.
			select {
			case <-ctx.Done():
				calm.Stop()
				end.Stop()
				return
			case <-changed:
				calm.Stop()
				continue
			case <-calm.C:
			case <-end.C:
				late = true
			}
			calm.Stop()
			if s.read(ctx) != nil {
				end.Stop()
				return
			}
			// What changed while it was read may be half old and half new.
			if len(changed) == 0 || late {
				break
			}
		}
		end.Stop()
		s.publish()
	}
}

// notifier turns file system events into a signal that something changed.
type notifier struct {
	w       *fsnotify.Watcher
	root    string // as given: may itself be a link that is swapped
	parent  string // of root
	visited map[string]bool
	nearby  atomic.Bool   // the parent holds files of ours, behind links
	changed chan struct{} // capacity 1: one is as good as many
	done    chan struct{}
}

func newNotifier(root string) (*notifier, error) {
	w, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	n := &notifier{
		w: w, root: root, parent: filepath.Dir(root),
		visited: map[string]bool{},
		changed: make(chan struct{}, 1),
		done:    make(chan struct{}),
	}
	// The parent tells when the root goes, comes back, or is another directory.
	if err := w.Add(n.parent); err != nil && !errors.Is(err, os.ErrPermission) {
		w.Close()
		return nil, err
	}
	go n.run()
	return n, nil
}

func (n *notifier) close() {
	n.w.Close()
	<-n.done
}

// run ends when the watcher is closed.
func (n *notifier) run() {
	defer close(n.done)
	events, errs := n.w.Events, n.w.Errors
	for events != nil || errs != nil {
		select {
		case e, ok := <-events:
			if !ok {
				events = nil
				continue
			}
			if filepath.Dir(e.Name) == n.parent && e.Name != n.root && !n.nearby.Load() {
				continue // the root's neighbours are not ours
			}
		case _, ok := <-errs: // events were lost: look
			if !ok {
				errs = nil
				continue
			}
		}
		select {
		case n.changed <- struct{}{}:
		default:
		}
	}
}

// add watches dir, which is resolved, and marks it as wanted.
func (n *notifier) add(dir string) error {
	n.visited[dir] = true
	if dir == n.parent {
		n.nearby.Store(true)
	}
	return n.w.Add(dir)
}

// sweep stops watching what was not added since the last sweep.
func (n *notifier) sweep() {
	for _, dir := range n.w.WatchList() {
		if !n.visited[dir] && dir != n.parent {
			n.w.Remove(dir) // its directory may be gone, and the watch with it
		}
	}
	n.nearby.Store(n.visited[n.parent])
	clear(n.visited)
	n.w.Add(n.parent) // it may have been replaced; one that is not there is seen by the rescan
}
