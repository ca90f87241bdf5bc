package client_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"aether/controlplane/registrar/client"
	"aether/dataplane/model"
)

type (
	ctx    = context.Context
	closer = io.Closer
)

// buffer is a log that may be written and read at once.
type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

func (b *buffer) Len() int { return len(b.String()) }

func logged() (*slog.Logger, *buffer) {
	b := &buffer{}
	return slog.New(slog.NewTextHandler(b, nil)), b
}

// TestCold: a name that is asked for comes into scope beside what is there, and one that does not exist is
// refused at once (contract 4.6, 9.9).
func TestCold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		for _, s := range []string{"shop/cart", "shop/pay", "shop/ship"} {
			f.add(s, pod("10.0.0.1", healthy, false))
		}
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		defer n.end()
		n.SetDeclared([]model.ServiceName{name("shop/cart")})
		pass(time.Second)
		if !n.heard.cold(name("shop/pay")) || n.heard.cold(name("shop/cart")) {
			t.Fatal("the catalog is not what it should be")
		}
		if a := n.Want(name("shop/none")); a != client.NoSuchName || n.Rejected.Value() != 1 || n.Misses.Value() != 0 {
			t.Errorf("a name that does not exist: %v", a)
		}
		began := time.Now()
		if a := n.Want(name("shop/pay")); a != client.Coming || n.Misses.Value() != 1 {
			t.Errorf("a name without rows here: %v", a)
		}
		synctest.Wait()
		if len(n.heard.of(name("shop/pay"))) != 1 || n.heard.cold(name("shop/pay")) || time.Since(began) != 0 {
			t.Errorf("after %s: %v", time.Since(began), n.heard.of(name("shop/pay")))
		}
		if a := n.Want(name("shop/pay")); a != client.Here {
			t.Errorf("a name that is here: %v", a)
		}
		q := f.requests()
		if last := q[len(q)-1]; len(last.Filter.Services) != 1 || last.Filter.Services[0] != "shop/pay" {
			t.Errorf("asked for %v: more than what is missing", last.Filter)
		}
		if f.streams() != 2 {
			t.Errorf("%d streams", f.streams())
		}
		// Another one right after it waits for 20 ms, with those that come meanwhile.
		n.Want(name("shop/ship"))
		pass(19 * time.Millisecond)
		synctest.Wait()
		if len(n.heard.of(name("shop/ship"))) != 0 {
			t.Error("two changes of scope within 20 ms")
		}
		pass(2 * time.Millisecond)
		synctest.Wait()
		n.agrees(t, f, everything)
		if f.streams() != 2 {
			t.Errorf("%d streams, want the first and another one", f.streams())
		}
		pass(time.Minute + time.Second)
		if f.streams() != 1 {
			t.Errorf("%d streams after a minute, want one for all", f.streams())
		}
		n.agrees(t, f, everything)
	})
}

// TestOldStreamsServe: while a new stream has not begun, what the old ones say counts.
func TestOldStreamsServe(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		for _, s := range []string{"shop/cart", "shop/pay", "shop/ship"} {
			f.add(s, pod("10.0.0.1", healthy, false))
		}
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		defer n.end()
		n.SetDeclared([]model.ServiceName{name("shop/cart")})
		pass(time.Second)
		n.Want(name("shop/pay"))
		pass(time.Second)
		f.mu.Lock()
		f.mute = true
		f.mu.Unlock()
		n.Want(name("shop/ship"))
		synctest.Wait()
		if len(f.requests()) < 3 {
			t.Fatal("nobody asks")
		}
		for _, s := range []string{"shop/cart", "shop/pay"} {
			f.add(s, pod("10.0.0.2", healthy, false))
			f.gone(s, "10.0.0.1")
		}
		synctest.Wait()
		n.agrees(t, f, func(s string) bool { return s != "shop/ship" })
		f.mu.Lock()
		f.mute = false
		f.mu.Unlock()
		pass(time.Minute) // it is given up, and asked for again
		n.agrees(t, f, everything)
	})
}

// TestResync: a snapshot on a stream that is open takes the place of what its scope had, and of no other's.
func TestResync(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		for _, s := range []string{"shop/cart", "shop/pay"} {
			f.add(s, pod("10.0.0.1", healthy, false))
			f.add(s, pod("10.0.0.2", healthy, true))
		}
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		defer n.end()
		n.SetDeclared([]model.ServiceName{name("shop/cart")})
		pass(time.Second)
		n.Want(name("shop/pay"))
		synctest.Wait()
		if f.streams() != 2 {
			t.Fatalf("%d streams", f.streams())
		}
		for _, s := range []string{"shop/cart", "shop/pay"} {
			f.lose(s, "10.0.0.1")
		}
		f.again()
		synctest.Wait()
		n.agrees(t, f, everything)
		f.lose("shop/pay", "10.0.0.2")
		f.again()
		synctest.Wait()
		n.agrees(t, f, everything)
	})
}

// TestWhatLeftIsNotResumed: rows that came over a second stream do not outlive their scope because the first is resumed.
func TestWhatLeftIsNotResumed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		for _, s := range []string{"shop/cart", "shop/pay"} {
			f.add(s, pod("10.0.0.1", healthy, false))
		}
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		defer n.end()
		cart := []model.ServiceName{name("shop/cart")}
		n.SetDeclared(cart)
		pass(2 * time.Minute)
		n.SetDeclared(append(cart, name("shop/pay")))
		pass(time.Second)
		n.agrees(t, f, everything)
		n.SetDeclared(cart)
		f.cutAll(errKilled)
		pass(2 * time.Minute)
		n.agrees(t, f, func(s string) bool { return s == "shop/cart" })
	})
}

// TestIdle: what was asked for leaves the scope after an hour in which nobody used it (contract 4.6); what is declared stays.
func TestIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		for _, s := range []string{"shop/cart", "shop/pay", "shop/busy"} {
			f.add(s, pod("10.0.0.1", healthy, false))
		}
		begun := time.Now()
		n := startNode(t, client.Config{
			Targets: []string{"10.0.0.1:8443"}, Dial: f.dial,
			InUse: func(ctx) []model.ServiceName {
				if time.Since(begun) == 0 { // before names are known, whatever is in use is taken to be one
					return nil
				}
				return []model.ServiceName{name("shop/busy"), name("no/body")}
			},
		})
		defer n.end()
		n.SetDeclared([]model.ServiceName{name("shop/cart")})
		n.Want(name("shop/pay"))
		n.Want(name("shop/busy"))
		pass(59 * time.Minute)
		n.agrees(t, f, everything)
		if n.Declared() != 1 || n.Asked() != 2 || n.Catalog() != 3 {
			t.Errorf("%d declared, %d asked for, %d in the catalog", n.Declared(), n.Asked(), n.Catalog())
		}
		pass(3 * time.Minute)
		n.agrees(t, f, func(s string) bool { return s != "shop/pay" })
		n.SetDeclared(nil)
		pass(2 * time.Minute)
		n.agrees(t, f, func(s string) bool { return s == "shop/busy" })
	})
}

// TestManyAreAskedFor: more names than a second stream takes are one new stream.
func TestManyAreAskedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		for i := range 100 {
			f.add(fmt.Sprintf("s/%d", i), pod("10.0.0.1", healthy, false))
		}
		f.silent = true
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		defer n.end()
		synctest.Wait()
		pass(time.Second)
		for i := range 65 {
			n.Want(name(fmt.Sprintf("s/%d", i)))
		}
		pass(time.Minute) // the last ones may have come on a second stream
		if f.streams() != 1 || n.Asked() != 65 {
			t.Errorf("%d streams, %d names", f.streams(), n.Asked())
		}
	})
}

// TestScopeDuringOutage: what is declared while no registrar is there is asked for once one is.
func TestScopeDuringOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		f.add("shop/cart", pod("10.0.0.1", healthy, false))
		f.add("shop/pay", pod("10.0.0.2", healthy, false))
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		defer n.end()
		n.SetDeclared([]model.ServiceName{name("shop/cart")})
		pass(2 * time.Minute)
		f.kill("10.0.0.1:8443", errKilled)
		pass(time.Minute)
		n.SetDeclared([]model.ServiceName{name("shop/cart"), name("shop/pay")})
		n.Want(name("shop/later")) // which is no name yet
		f.start("10.0.0.1:8443")
		pass(31 * time.Second)
		n.agrees(t, f, everything)
	})
}
