package client_test

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"aether/controlplane/registrar/client"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

// numbered are names s/from to s/to-1.
func numbered(from, to int) (list []model.ServiceName) {
	for i := from; i < to; i++ {
		list = append(list, name(fmt.Sprintf("s/%d", i)))
	}
	return list
}

// said is what the node has as problems, and whether its newest stream asks for everything.
func (n *node) said(f *fleet) (problems string, everything bool) {
	n.heard.mu.Lock()
	defer n.heard.mu.Unlock()
	for _, p := range n.heard.problems {
		problems += p.Object + ": " + p.Reason + "\n"
	}
	q := f.requests()
	return problems, q[len(q)-1].Filter == nil
}

// TestNobodyWaitsForTheNames: rows that a request waits for are told as soon as they are here (contract 9.7: before
// the names), and what a stream that does not end said of them does not stay behind when it breaks.
func TestNobodyWaitsForTheNames(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		for _, s := range []string{"shop/cart", "shop/pay", "shop/ship"} {
			f.add(s, pod("10.0.0.1", healthy, true))
		}
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		defer n.end()
		n.SetDeclared([]model.ServiceName{name("shop/cart")})
		pass(time.Second)
		f.mu.Lock()
		f.endless = 1
		f.mu.Unlock()
		n.Want(name("shop/pay"))
		synctest.Wait()
		if len(n.heard.of(name("shop/pay"))) != 1 || len(n.heard.of(name("shop/cart"))) != 1 {
			t.Errorf("rows that are here are not told: %v", n.heard.of(name("shop/pay")))
		}
		if n.Want(name("shop/pay")) == client.Here {
			t.Error("its stream is not complete, and it is called known")
		}
		f.lose("shop/pay", "10.0.0.1")
		f.add("shop/pay", pod("10.0.0.2", healthy, false))
		f.mu.Lock()
		f.endless = 0
		f.mu.Unlock()
		f.cutAll(errKilled)
		pass(time.Minute)
		n.agrees(t, f, func(s string) bool { return s != "shop/ship" })
	})
}

// TestDemandIsNotHeldOff: what somebody waits for does not wait for the 250 ms between changes of scope (contract
// 9.9), whatever else has just changed it; what is only declared does.
func TestDemandIsNotHeldOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		for i := range 30 {
			f.add(fmt.Sprintf("s/%d", i), pod("10.0.0.1", healthy, false))
		}
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		defer n.end()
		pass(time.Second)
		n.SetDeclared(numbered(0, 1)) // at once
		synctest.Wait()
		n.SetDeclared(numbered(0, 2)) // and after 250 ms
		pass(100 * time.Millisecond)
		if len(n.heard.of(name("s/1"))) > 0 {
			t.Error("two changes of what is declared within 250 ms")
		}
		for i := 2; i < 30; i++ {
			n.Want(name(fmt.Sprintf("s/%d", i)))
			pass(21 * time.Millisecond)
			synctest.Wait()
			if len(n.heard.of(name(fmt.Sprintf("s/%d", i)))) == 0 {
				t.Fatalf("s/%d is not here after 21 ms", i)
			}
		}
		if len(n.heard.of(name("s/1"))) == 0 {
			t.Error("what is declared did not go with what is asked for")
		}
		n.agrees(t, f, everything)
		// What is declared and not here yet is asked for as well, once somebody waits for it.
		f.add("s/30", pod("10.0.0.1", healthy, false))
		n.SetDeclared(numbered(0, 31))
		n.Want(name("s/30"))
		pass(21 * time.Millisecond)
		synctest.Wait()
		if len(n.heard.of(name("s/30"))) == 0 {
			t.Error("a declared name that somebody waits for is held off")
		}
	})
}

// TestJoined: the second stream is joined with the first one when it has 8 names, or the root of twice those of the
// first, 64 at most; until it is, it goes on growing to 128, and nobody waits for the joining.
func TestJoined(t *testing.T) {
	for _, tt := range []struct{ declared, most int }{{1, 8}, {200, 20}, {2048, 64}} {
		synctest.Test(t, func(t *testing.T) {
			f := newFleet("10.0.0.1:8443")
			for i := range tt.declared + 200 {
				f.add(fmt.Sprintf("s/%d", i), pod("10.0.0.1", healthy, false))
			}
			n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
			defer n.end()
			n.SetDeclared(numbered(0, tt.declared))
			pass(time.Minute + time.Second) // by then they are the first stream's
			next := tt.declared
			ask := func(names int) {
				t.Helper()
				for names > 0 {
					some := min(names, 16)
					for _, s := range numbered(next, next+some) {
						n.Want(s)
					}
					pass(21 * time.Millisecond)
					synctest.Wait()
					for _, s := range numbered(next, next+some) {
						if len(n.heard.of(s)) == 0 {
							t.Fatalf("of %d declared: %s is not here after 21 ms", tt.declared, s)
						}
					}
					next, names = next+some, names-some
				}
			}
			ask(tt.most)
			if f.streams() != 2 {
				t.Errorf("of %d declared: %d streams for %d names", tt.declared, f.streams(), tt.most)
			}
			f.mu.Lock()
			f.endless = 129
			if tt.declared < 129 {
				f.endless = 0
			}
			f.mu.Unlock()
			ask(1)
			if tt.declared < 129 {
				if f.streams() != 1 {
					t.Errorf("%d streams, want them joined", f.streams())
				}
				return
			}
			ask(128 - tt.most - 1)
			if f.streams() != 3 {
				t.Errorf("of %d declared: %d streams while they are joined", tt.declared, f.streams())
			}
			n.Want(name(fmt.Sprintf("s/%d", next)))
			pass(time.Second)
			for _, q := range f.requests() {
				if names := len(q.Filter.Services); names > 128 && names < tt.declared {
					t.Errorf("%d names on a second stream", names)
				}
			}
			// A change of what has come twice is known once, from whichever stream tells it last.
			f.mu.Lock()
			f.endless = 0
			f.mu.Unlock()
			f.cutAll(errKilled)
			pass(2 * time.Minute)
			n.agrees(t, f, func(s string) bool { return slices.Contains(numbered(0, next+1), name(s)) })
		})
	}
}

// TestNothingIsLostByJoining: while the two streams are joined, and after it, what came into scope meanwhile stays
// known, and what both tell is known as the first one tells it, however late the second one is.
func TestNothingIsLostByJoining(t *testing.T) {
	start := func(t *testing.T) (*fleet, *node) {
		f := newFleet("10.0.0.1:8443")
		for i := range 300 {
			f.add(fmt.Sprintf("s/%d", i), pod("10.0.0.1", healthy, false))
		}
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		n.SetDeclared(numbered(0, 200))
		pass(time.Minute + time.Second)
		for _, s := range numbered(200, 220) {
			n.Want(s)
		}
		pass(time.Second)
		return f, n
	}
	t.Run("the first one is slower", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f, n := start(t)
			defer n.end()
			most, last := 0, ""
			n.heard.mu.Lock()
			n.heard.look = func(rows map[model.ServiceName][]string) {
				if len(rows) < most {
					t.Errorf("%d services are known, of %d", len(rows), most)
				}
				most = max(most, len(rows))
				if now := strings.Join(rows[name("s/210")], ""); now != last && strings.Contains(last, "health=3") {
					t.Errorf("it was\n%s\nand is again\n%s", last, now)
				} else {
					last = now
				}
			}
			n.heard.mu.Unlock()
			f.mu.Lock()
			f.endless = 129
			f.mu.Unlock()
			for _, s := range numbered(220, 226) { // the first of them has the joining begin, the others come later
				n.Want(s)
				pass(50 * time.Millisecond)
			}
			f.stall(129)
			f.release()
			synctest.Wait()
			f.add("s/210", pod("10.0.0.1", registrypb.ServiceEndpoint_UNHEALTHY, false))
			f.add("s/210", pod("10.0.0.1", registrypb.ServiceEndpoint_DRAINING, false))
			synctest.Wait()
			f.trickle(2) // the end of its beginning, and the first change
			pass(time.Second)
			f.stall(0)
			pass(time.Second)
			n.agrees(t, f, func(s string) bool { return slices.Contains(numbered(0, 226), name(s)) })
			if f.streams() != 2 {
				t.Errorf("%d streams: five names came after the joining had begun", f.streams())
			}
			pass(time.Minute)
			if f.streams() != 1 {
				t.Errorf("%d streams after a minute", f.streams())
			}
			n.agrees(t, f, func(s string) bool { return slices.Contains(numbered(0, 226), name(s)) })
		})
	})
	t.Run("the second one is slower", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			f, n := start(t)
			defer n.end()
			f.stall(129)
			n.Want(name("s/220"))
			pass(time.Second)
			if len(n.heard.of(name("s/220"))) == 0 {
				t.Error("it waits for the second stream though the first one has it")
			}
			f.stall(0)
			pass(time.Second)
			if f.streams() != 1 {
				t.Errorf("%d streams: the first one has everything", f.streams())
			}
			n.agrees(t, f, func(s string) bool { return slices.Contains(numbered(0, 221), name(s)) })
		})
	})
}

// TestTooManyToName: a node that needs more services than a registrar takes names of asks for all, and says so; once
// it needs fewer it does no more (decision 034).
func TestTooManyToName(t *testing.T) {
	for _, tt := range []struct {
		name    string
		fits    []model.ServiceName
		one     model.ServiceName
		fewer   int
		problem string
	}{
		{"names", numbered(0, 16384), name("s/16384"), 14000, "16384"},
		{"bytes", long(0, 7561), long(7561, 7562)[0], 5000, "983040 bytes"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFleet("10.0.0.1:8443")
				for _, s := range []string{tt.fits[0].String(), tt.one.String(), "shop/cart"} {
					f.add(s, pod("10.0.0.1", healthy, false))
				}
				used := false
				n := startNode(t, client.Config{
					Targets: []string{"10.0.0.1:8443"}, Dial: f.dial,
					InUse: func(ctx) []model.ServiceName {
						if !used {
							return nil
						}
						return []model.ServiceName{name("shop/cart")}
					},
				})
				defer n.end()
				n.SetDeclared(tt.fits)
				pass(time.Second)
				if p, all := n.said(f); p != "" || all {
					t.Fatalf("%q, everything %v", p, all)
				}
				n.SetDeclared(append(slices.Clone(tt.fits), tt.one))
				pass(time.Second)
				if p, all := n.said(f); !strings.Contains(p, tt.problem) || !all {
					t.Fatalf("%q, everything %v", p, all)
				}
				n.agrees(t, f, everything)
				used = true
				n.SetDeclared(tt.fits) // one fewer: not to and fro
				pass(2 * time.Minute)
				if _, all := n.said(f); !all {
					t.Error("at the bound everything is asked for now, and now is not")
				}
				n.SetDeclared(tt.fits[:tt.fewer])
				pass(2 * time.Minute)
				if p, all := n.said(f); p != "" || all {
					t.Errorf("%q, everything %v", p, all)
				}
				// What was used without anybody asking, for it was here, stays: connections to it are open.
				n.agrees(t, f, func(s string) bool { return s != tt.one.String() })
			})
		})
	}
}

// long are names as long as they may be, of which 7,561 are just what a message takes.
func long(from, to int) (list []model.ServiceName) {
	for i := from; i < to; i++ {
		list = append(list, model.ServiceName{Namespace: strings.Repeat("n", 63), Name: fmt.Sprintf("s%062d", i)})
	}
	return list
}

// TestManyInUse: 4,096 names are in scope because they were asked for. One more takes the place of one that is not in
// use; where all are, none is taken away from the pods that use it: everything is asked for, until fewer are.
func TestManyInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		const services = 4200
		for i := range services {
			f.add(fmt.Sprintf("s/%d", i), pod("10.0.0.1", healthy, false))
		}
		f.silent = true
		var mu sync.Mutex
		var used []model.ServiceName
		use := func(list []model.ServiceName) {
			mu.Lock()
			used = list
			mu.Unlock()
		}
		n := startNode(t, client.Config{
			Targets: []string{"10.0.0.1:8443"}, Dial: f.dial,
			InUse: func(ctx) []model.ServiceName { mu.Lock(); defer mu.Unlock(); return used },
		})
		defer n.end()
		pass(time.Second)
		for _, s := range numbered(0, 4096) {
			n.Want(s)
		}
		use(numbered(1, 4096))
		pass(3 * time.Minute)
		if p, all := n.said(f); p != "" || all || n.Asked() != 4096 {
			t.Fatalf("%q, everything %v, %d", p, all, n.Asked())
		}
		n.Want(name("s/4096"))
		pass(time.Second)
		if p, all := n.said(f); p != "" || all || n.Asked() != 4096 || len(n.heard.of(name("s/4096"))) != 1 {
			t.Fatalf("there was one that nobody used: %q, everything %v, %d", p, all, n.Asked())
		}
		use(numbered(1, 4097))
		pass(2 * time.Minute)
		n.Want(name("s/4097"))
		pass(time.Second)
		if p, all := n.said(f); !strings.Contains(p, "4096") || !all || n.Asked() != 4096 {
			t.Fatalf("all are in use: %q, everything %v, %d", p, all, n.Asked())
		}
		n.agrees(t, f, everything)
		use(numbered(4000, 4200))
		pass(2 * time.Hour)
		if p, all := n.said(f); p != "" || all {
			t.Errorf("%q, everything %v", p, all)
		}
		n.agrees(t, f, func(s string) bool { return slices.Contains(numbered(4000, 4200), name(s)) })
	})
}
