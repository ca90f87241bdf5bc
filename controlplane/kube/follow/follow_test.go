package follow

import (
	"context"
	"net"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	kubewatch "k8s.io/apimachinery/pkg/watch"
)

// server is an API server's pods, which can be away.
type server struct {
	mu    sync.Mutex
	away  bool
	tries []time.Time // while it was away
	watch *kubewatch.FakeWatcher
}

func (s *server) kind() Kind {
	return Kind{
		Name: "pods", Example: &corev1.Pod{},
		List: func(context.Context, metav1.ListOptions) (runtime.Object, error) {
			if err := s.asked(); err != nil {
				return nil, err
			}
			return &corev1.PodList{ListMeta: metav1.ListMeta{ResourceVersion: "7"}, Items: []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "a", ResourceVersion: "5"}}}}, nil
		},
		Watch: func(_ context.Context, o metav1.ListOptions) (kubewatch.Interface, error) {
			if err := s.asked(); err != nil {
				return nil, err
			}
			s.mu.Lock()
			defer s.mu.Unlock()
			s.watch = kubewatch.NewFakeWithOptions(kubewatch.FakeOptions{ChannelSize: 2})
			if o.SendInitialEvents != nil && *o.SendInitialEvents {
				s.watch.Add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", ResourceVersion: "5"}})
				s.watch.Action(kubewatch.Bookmark, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{ResourceVersion: "7", Annotations: map[string]string{metav1.InitialEventsAnnotationKey: "true"}}})
			}
			return s.watch, nil
		},
	}
}

// asked is the error of a connect to a server that is away.
func (s *server) asked() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.away {
		return nil
	}
	s.tries = append(s.tries, time.Now())
	return &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
}

func (s *server) set(away bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.away = away; away && s.watch != nil {
		s.watch.Stop()
	}
}

// TestAway: an API server that is away, for however long, is asked again and again, at
// most retryMax after the last time, and followed again at most so long after it is back.
// Before it is listed the first time as well as afterwards. Nobody who ends it waits.
func TestAway(t *testing.T) {
	for _, known := range []bool{false, true} {
		for _, away := range []time.Duration{time.Minute, 10 * time.Hour} {
			synctest.Test(t, func(t *testing.T) {
				s := &server{away: !known}
				ctx, cancel := context.WithCancel(t.Context())
				var mu sync.Mutex
				var whole []time.Time
				errs := 0
				done := make(chan struct{})
				go func() {
					defer close(done)
					Objects(ctx, s.kind(), func(o runtime.Object) *corev1.Pod { return o.(*corev1.Pod) }, func(n Event[*corev1.Pod]) {
						mu.Lock()
						defer mu.Unlock()
						if n.Op == Replaced {
							whole = append(whole, time.Now())
						}
						if n.Err != nil {
							errs++
						}
					})
				}()
				<-time.After(time.Second)
				s.set(true)
				<-time.After(away)
				synctest.Wait()
				s.mu.Lock()
				tries := s.tries
				s.mu.Unlock()
				if len(tries) < int(away/retryMax) {
					t.Fatalf("known before: %t: asked %d times in %s", known, len(tries), away)
				}
				for i, at := range tries[1:] {
					if gap := at.Sub(tries[i]); gap > retryMax {
						t.Errorf("known before: %t: %s between tries %d and %d", known, gap, i, i+1)
					}
				}
				mu.Lock()
				if errs == 0 {
					t.Error("nobody was told that it is away")
				}
				lists := len(whole)
				mu.Unlock()
				s.set(false)
				<-time.After(retryMax)
				synctest.Wait()
				s.mu.Lock()
				now := len(s.tries)
				watched := s.watch
				s.mu.Unlock()
				mu.Lock()
				if now != len(tries) || !known && len(whole) != lists+1 || watched == nil || watched.IsStopped() {
					t.Errorf("known before: %t: not followed again %s after it is back", known, retryMax)
				}
				mu.Unlock()

				s.set(true) // and ended in the middle of a wait
				<-time.After(away)
				end := time.Now()
				cancel()
				<-done
				if took := time.Since(end); took > 0 {
					t.Errorf("known before: %t: it ended after %s", known, took)
				}
			})
		}
	}
}

// TestEnd: whoever ends it does not wait for the next try, also where there was no listing yet.
func TestEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &server{away: true}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			Objects(ctx, s.kind(), func(o runtime.Object) *corev1.Pod { return o.(*corev1.Pod) }, func(Event[*corev1.Pod]) {})
		}()
		<-time.After(time.Minute)
		end := time.Now()
		cancel()
		<-done
		if took := time.Since(end); took > 0 {
			t.Errorf("it ended after %s", took)
		}
	})
}
