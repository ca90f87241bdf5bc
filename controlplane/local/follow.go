package local

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	"aether/controlplane/input"
	"aether/dataplane/model"
)

const (
	maxFollowed = 64               // pods that are added or removed at once
	followAgain = 10 * time.Second // before what could not be added or removed is tried again
)

// Listed is a pod of a list of all.
type Listed struct {
	Pod
	Termination // counts once the pod is Terminating
}

// Follower has Pods hold what a list of all says, for a node where no CNI plugin calls.
// The list is the word: a pod that is not in it is removed; where the list is of a part, one that was in a list before.
// Make it by NewFollower.
type Follower struct {
	pods *Pods
	wake chan struct{} // of one

	mu   sync.Mutex
	list []Listed
	part bool // a pod that is not in list may be there
	told bool
}

// NewFollower makes a Follower of pods; nothing is done before Run.
func NewFollower(pods *Pods) *Follower {
	return &Follower{pods: pods, wake: make(chan struct{}, 1)}
}

// Tell says which pods there are now: all of them, or in part, and then one is removed only if it was in an earlier
// list. It does not wait. Of two with one container the later one counts. Safe for concurrent use.
func (f *Follower) Tell(list []Listed, part bool) {
	f.mu.Lock()
	f.list, f.part, f.told = list, part, true
	f.mu.Unlock()
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// Run follows until ctx ends, from the first list on; until then nothing is removed.
func (f *Follower) Run(ctx context.Context) error {
	done := map[string]Pod{} // by container, as they were last taken
	failed := map[string]bool{}
	listed := map[string]bool{} // containers that are or were in a list and have not been removed
	for {
		f.mu.Lock()
		list, part, told := f.list, f.part, f.told
		f.mu.Unlock()
		if told {
			f.follow(ctx, list, part, done, failed, listed)
		}
		var again <-chan time.Time
		var timer *time.Timer
		if len(failed) > 0 {
			timer = time.NewTimer(followAgain)
			again = timer.C
		}
		select {
		case <-f.wake:
		case <-again:
		case <-ctx.Done():
			return nil
		}
		if timer != nil {
			timer.Stop()
		}
	}
}

// follow makes one list so. What leaves is told first: that waits for nobody.
func (f *Follower) follow(ctx context.Context, list []Listed, part bool, done map[string]Pod, failed, listed map[string]bool) {
	want := make(map[string]Listed, len(list))
	for _, p := range list {
		want[p.ContainerID], listed[p.ContainerID] = p, true
		if p.Terminating {
			f.pods.Terminating(p.ContainerID, p.Termination)
		}
	}
	gone := map[string]string{} // container to pod
	for _, s := range f.pods.State() {
		if _, ok := want[s.Container]; !ok && (!part || listed[s.Container]) {
			gone[s.Container] = s.Pod
		}
	}
	for c := range listed {
		if _, ok := want[c]; !ok && gone[c] == "" {
			delete(listed, c)
		}
	}
	for c := range failed {
		if _, ok := want[c]; !ok && gone[c] == "" { // nobody's any more
			f.say(c, "", nil)
			delete(failed, c)
		}
	}

	var mu sync.Mutex // of done and failed
	var wg sync.WaitGroup
	places := make(chan struct{}, maxFollowed)
	each := func(container, pod string, do func() error) {
		places <- struct{}{}
		wg.Go(func() {
			err := do()
			<-places
			if ctx.Err() != nil {
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil || failed[container] {
				f.say(container, pod, err)
			}
			if delete(failed, container); err != nil {
				failed[container] = true
			}
		})
	}
	for c, pod := range gone {
		delete(done, c)
		each(c, pod, func() error { return f.pods.Remove(ctx, c) })
	}
	wg.Wait() // a namespace or an address may be another's from now on
	for c, p := range want {
		mu.Lock()
		last, ok := done[c]
		mu.Unlock()
		if ok && reflect.DeepEqual(last, p.Pod) {
			continue
		}
		each(c, p.Namespace+"/"+p.Name, func() error {
			r, err := f.pods.Add(ctx, p.Pod)
			if err == nil && r == Ignored {
				err = errors.New("it is none of the mesh's")
			}
			mu.Lock()
			defer mu.Unlock()
			if delete(done, c); err == nil {
				done[c] = p.Pod
			}
			return err
		})
	}
	wg.Wait()
}

// say tells of what could not be done with a container's pod; nil: all is well.
func (f *Follower) say(container, pod string, err error) {
	var problems []model.Problem
	if err != nil {
		f.pods.quiet.Warn("follow "+container, "a pod cannot be taken or forgotten; it is tried again", "pod", pod, "container", container, "err", err)
		problems = []model.Problem{{Object: "Pod " + pod, Reason: fmt.Sprintf("%v; it is tried again", err)}}
	}
	f.pods.cfg.Sink.Apply(input.Batch{Tables: input.Tables{Problems: map[string][]model.Problem{"list " + container: problems}}})
}
