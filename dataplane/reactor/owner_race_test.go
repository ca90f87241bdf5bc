//go:build race

package reactor

import (
	"reflect"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

// TestThreadRules: what a loop owns is used on its thread alone. Each method that belongs
// to the loop panics anywhere else, although Post and what it brings order all of
// these calls, so that the race detector has nothing to say; on the loop none does.
func TestThreadRules(t *testing.T) {
	l, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	fd, peer := pair(t)
	defer unix.Close(peer)
	var timer Timer
	src := &fake{fail: func(error) {
		l.Unregister(fd)
		unix.Close(fd)
	}}
	if err := l.Register(fd, src, Stream); err != nil { // nothing runs yet: whoever made the loop may
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(l.Run)
	onLoop := func(f func()) {
		t.Helper()
		done := make(chan struct{})
		if err := l.Post(func() { defer close(done); f() }); err != nil {
			t.Fatal(err)
		}
		<-done
	}
	panicked := func(f func()) (cause any) {
		defer func() { cause = recover() }()
		f()
		return nil
	}
	onLoop(func() {})
	// What is not the loop's own: from any goroutine, or before it runs.
	known := map[string]bool{"Post": true, "Stop": true, "Run": true, "Stats": true, "Check": true, "ID": true}
	for _, tt := range []struct {
		name string
		call func()
	}{
		{"Replace", func() { l.Replace(fd, src) }},
		{"Dirty", func() { l.Dirty(src) }},
		{"Later", func() { l.Later(src) }},
		{"PutOff", func() { l.PutOff() }},
		{"Do", func() { l.Do(src) }},
		{"After", func() { l.After(src) }},
		{"Arm", func() { l.Arm(&timer, src, 1<<40) }},
		{"Disarm", func() { l.Disarm(&timer) }},
		{"Each", func() { l.Each(func(Source) {}) }},
		{"Now", func() { l.Now() }},
		{"Iteration", func() { l.Iteration() }},
		{"Pending", func() { l.Pending(fd) }},
		{"Detach", func() { _ = l.Detach(fd) }},
		{"Register", func() { _ = l.Register(fd, src, Stream) }},
		{"Forget", func() { l.Unregister(-1) }},
	} {
		known[tt.name] = true
		cause, _ := panicked(tt.call).(string)
		if !strings.Contains(cause, "by Post") || tt.name != "Detach" && !strings.Contains(cause, tt.name+" is called on thread") {
			t.Errorf("%s, elsewhere: panic %q, want one that names it", tt.name, cause)
		}
		onLoop(func() {
			if cause := panicked(tt.call); cause != nil {
				t.Errorf("%s, on the loop: panic %v", tt.name, cause)
			}
		})
	}
	for m := range reflect.TypeFor[*Loop]().Methods() {
		if !known[m.Name] {
			t.Errorf("%s: is it the loop's own? It stands in neither list", m.Name)
		}
	}
	l.Stop()
	wg.Wait()
	if n := l.Stats().Panics; n != 0 {
		t.Errorf("%d panics on the loop", n)
	}
}
