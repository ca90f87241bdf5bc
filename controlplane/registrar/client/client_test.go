package client_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"aether/controlplane/registrar/client"
	"aether/controlplane/registrypb"
	"aether/dataplane/model"
)

const (
	healthy   = registrypb.ServiceEndpoint_HEALTHY
	unhealthy = registrypb.ServiceEndpoint_UNHEALTHY
	draining  = registrypb.ServiceEndpoint_DRAINING
)

// TestConverges: whatever happens to rows, registrars, streams and the node's scope, the node ends with what the
// registry has in its scope, never knows a row that never existed, and never knows less than it did of what did
// not change (contract 9.7; case 143).
func TestConverges(t *testing.T) {
	const runs, steps = 60, 120
	services := []string{"shop/a", "shop/b", "shop/c", "pay/a", "pay/b", "x/1", "x/2", "x/3"}
	var snapshots, events uint64
	for seed := range uint64(runs) {
		synctest.Test(t, func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 1))
			f := newFleet("10.0.0.1:8443", "10.0.0.2:8443")
			var known sync.Mutex
			ever := map[string]bool{}
			write := func(service string, e *row, p place) {
				if !faulty(e) {
					known.Lock()
					ever[shown(service, e)] = true
					known.Unlock()
				}
				f.put(p, e)
			}
			for i := range 5 {
				e := pod(fmt.Sprintf("10.9.0.%d", i+1), healthy, true)
				for _, s := range []string{"anchor/declared", "anchor/asked"} {
					ever[shown(s, e)] = true
					f.add(s, e)
				}
			}
			anchors := map[string][]string{"anchor/declared": f.rowsOf("anchor/declared"), "anchor/asked": f.rowsOf("anchor/asked")}
			seen := map[string]bool{}
			h := newHeard()
			h.look = func(rows map[model.ServiceName][]string) {
				known.Lock()
				defer known.Unlock()
				for n, l := range rows {
					for _, r := range l {
						if !ever[r] {
							t.Errorf("seed %d: a row of %s that never was: %s", seed, n, r)
						}
					}
				}
				for _, s := range []string{"anchor/declared", "anchor/asked"} {
					if l := rows[name(s)]; slices.Equal(l, anchors[s]) {
						seen[s] = true
					} else if seen[s] || len(l) > 0 {
						t.Errorf("seed %d: %s, which does not change, is known as %v", seed, s, l)
					}
				}
			}
			f.more, f.silent = seed%3 == 0, seed%2 == 0
			whole := seed%5 == 0
			declared := []model.ServiceName{name("anchor/declared")}
			asked := map[string]bool{"anchor/asked": true}
			n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443", "10.0.0.2:8443"}, Dial: f.dial, Sink: h, Whole: whole, Identities: []string{"/custom"}})
			defer n.end()
			n.SetDeclared(declared)
			n.Want(name("anchor/asked"))
			down := ""
			for range steps {
				service := services[rnd.IntN(len(services))]
				ip := fmt.Sprintf("10.0.0.%d", 1+rnd.IntN(6))
				switch rnd.IntN(14) {
				case 0, 1, 2, 3: // a row comes or changes, under one class after the other
					e := pod(ip, registrypb.ServiceEndpoint_Health(rnd.IntN(4)), rnd.IntN(2) == 0)
					if rnd.IntN(4) == 0 {
						e.KubernetesMetadata.NodeName = "n2"
						e.SpiffeId = "spiffe://td/custom"
					}
					for _, p := range classesOf(e) {
						write(service, e, place{service, p, ip})
						if rnd.IntN(2) == 0 {
							synctest.Wait()
						}
					}
				case 4:
					f.gone(service, ip)
				case 5:
					f.put(place{service, registrypb.Service_Protocol(1 + rnd.IntN(2)), ip}, nil)
				case 6: // what nobody can use
					e := pod(ip, healthy, false)
					e.Ports = append(e.Ports, 7000)
					write(service, e, place{service, registrypb.Service_PROTOCOL_HTTP, ip})
				case 7:
					f.cutAll([]error{errKilled, errLoss, status.Error(codes.Internal, "x")}[rnd.IntN(3)])
				case 8: // a registrar goes, and another one comes, of another epoch
					if down == "" {
						down = []string{"10.0.0.1:8443", "10.0.0.2:8443"}[rnd.IntN(2)]
						f.kill(down, errKilled)
					} else {
						f.start(down)
						down = ""
					}
				case 9:
					declared = []model.ServiceName{name("anchor/declared")}
					for _, s := range services {
						if rnd.IntN(3) == 0 {
							declared = append(declared, name(s))
						}
					}
					n.SetDeclared(declared)
				case 10, 11:
					if n.Want(name(service)) != client.NoSuchName && !slices.Contains(declared, name(service)) {
						asked[service] = true
					}
				case 12:
					if rnd.IntN(4) == 0 {
						f.again()
					}
				case 13:
					pass([]time.Duration{time.Millisecond, 2 * time.Minute}[rnd.IntN(2)])
				}
				if rnd.IntN(3) == 0 {
					pass(time.Duration(rnd.IntN(3000)) * time.Millisecond)
				}
				if rnd.IntN(2) == 0 {
					synctest.Wait()
				}
			}
			if down != "" {
				f.start(down)
			}
			pass(5 * time.Minute)
			wants := func(s string) bool {
				return whole || slices.Contains(declared, name(s)) || asked[s]
			}
			n.agrees(t, f, wants)
			if got := n.heard.status(); !got.Connected || got.Err != "" {
				t.Errorf("seed %d: %+v", seed, got)
			}
			if n := f.streams(); n != 1 {
				t.Errorf("seed %d: %d streams, want one", seed, n)
			}
			if h.replaces != 1 {
				t.Errorf("seed %d: %d whole states", seed, h.replaces)
			}
			snapshots += uint64(len(f.requests()))
			events += n.Events.Value()
		})
	}
	t.Logf("%d runs of %d steps: %d streams, %d messages", runs, steps, snapshots, events)
}

func (f *fleet) rowsOf(service string) (out []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for p, e := range f.rows {
		if l := shown(service, e); p.service == service && !slices.Contains(out, l) {
			out = append(out, l)
		}
	}
	slices.Sort(out)
	return out
}

// TestFilter: unset is everything, set and empty is the catalog alone, and it is said again on
// each connection (contract 9.7).
func TestFilter(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		f.add("shop/cart", pod("10.0.0.1", healthy, false))
		f.add("shop/pay", pod("10.0.0.2", healthy, false))
		scoped := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial})
		defer scoped.end()
		whole := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial, Whole: true})
		defer whole.end()
		synctest.Wait()
		whole.agrees(t, f, everything)
		scoped.agrees(t, f, func(string) bool { return false })
		for _, q := range f.requests() {
			if q.GetClusterName() != "c1" || q.GetNodeName() != "n1" || q.GetInstance() == "" || q.GetLastVersion() != "" {
				t.Errorf("asked %v", q)
			}
		}
		scoped.SetDeclared([]model.ServiceName{name("shop/cart")})
		pass(time.Second)
		scoped.agrees(t, f, func(s string) bool { return s == "shop/cart" })
		pass(2 * time.Minute) // one stream again
		before := len(f.requests())
		f.cutAll(errKilled)
		pass(time.Minute)
		scoped.agrees(t, f, func(s string) bool { return s == "shop/cart" })
		again := f.requests()[before:]
		if len(again) != 2 {
			t.Fatalf("%d streams after the cut, want 2", len(again))
		}
		for _, q := range again {
			if q.GetLastVersion() == "" {
				t.Errorf("nothing has changed, and all is asked for again: %v", q)
			}
			if q.Filter != nil && !slices.Equal(q.Filter.Services, []string{"shop/cart"}) {
				t.Errorf("filter %v", q.Filter)
			}
		}
	})
}

// TestKeepsWhatItKnows: a node whose registrars are all away keeps what it knew, and says what is wrong and since when.
func TestKeepsWhatItKnows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		f.add("shop/cart", pod("10.0.0.1", healthy, false))
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial, Whole: true})
		defer n.end()
		synctest.Wait()
		if s := n.heard.status(); !s.Connected || s.Version == "" {
			t.Fatalf("%+v", s)
		}
		f.kill("10.0.0.1:8443", errKilled)
		synctest.Wait()
		since := time.Now()
		f.add("shop/cart", pod("10.0.0.2", healthy, false)) // which nobody hears of
		pass(time.Hour)
		if got := n.heard.of(name("shop/cart")); len(got) != 1 {
			t.Errorf("it knows %v", got)
		}
		s := n.heard.status()
		if s.Connected || !strings.Contains(s.Err, "10.0.0.1:8443") || !strings.Contains(s.Err, "NetworkPolicy") {
			t.Errorf("%+v", s)
		}
		if s.Since.Sub(since).Abs() > 5*time.Second {
			t.Errorf("since %s, want %s", s.Since, since)
		}
		f.start("10.0.0.1:8443")
		pass(31 * time.Second) // the longest wait
		n.agrees(t, f, everything)
		if h := n.heard; h.replaces != 1 {
			t.Errorf("%d whole states", h.replaces)
		}
	})
}

// TestBackoff: 1 to 30 s with jitter (contract 9.7), to one registrar after the other.
func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet()
		dialled := []time.Time{}
		var addrs []string
		n := startNode(t, client.Config{
			Targets: []string{"registrar:8443"}, Whole: true,
			Resolve: func(_ ctx, host string) ([]string, error) {
				if host != "registrar" {
					return nil, errNone
				}
				return []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"}, nil
			},
			Dial: func(c ctx, addr string) (registrypb.RegistrarServiceClient, closer, error) {
				dialled, addrs = append(dialled, time.Now()), append(addrs, addr)
				return f.dial(c, addr)
			},
		})
		pass(20 * time.Minute)
		n.end()
		var waits []time.Duration
		for i := range dialled[1:] {
			waits = append(waits, dialled[i+1].Sub(dialled[i]))
		}
		if waits[0] < time.Second || waits[0] > 2*time.Second {
			t.Errorf("the first wait is %s", waits[0])
		}
		if least, most := slices.Min(waits), slices.Max(waits); least < time.Second || most > 30*time.Second || most < 20*time.Second {
			t.Errorf("waits of %s to %s", least, most)
		}
		for i := 1; i < len(addrs); i++ {
			if addrs[i] == addrs[i-1] {
				t.Errorf("%s twice in a row", addrs[i])
			}
		}
		if n := len(slices.Compact(slices.Sorted(slices.Values(addrs)))); n != 3 {
			t.Errorf("%d registrars were tried", n)
		}
	})
}

// TestQuietRegistrar: who takes the stream and says nothing is left for another one.
func TestQuietRegistrar(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		f.mute = true
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial, Whole: true})
		defer n.end()
		pass(16 * time.Second)
		if s := n.heard.status(); s.Connected || !strings.Contains(s.Err, "says nothing") {
			t.Errorf("%+v", s)
		}
		if n.heard.replaces != 0 {
			t.Error("a state is said that nobody gave")
		}
		f.mu.Lock()
		f.mute = false
		f.mu.Unlock()
		pass(time.Minute)
		n.agrees(t, f, everything)
	})
}

// TestDataLoss: a registrar that could not tell all is asked for all (contract 9.7; case 143).
func TestDataLoss(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		f.add("shop/cart", pod("10.0.0.1", healthy, false))
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial, Whole: true})
		defer n.end()
		synctest.Wait()
		f.cutAll(errLoss)
		pass(time.Minute)
		q := f.requests()
		if len(q) != 2 || q[1].GetLastVersion() != "" {
			t.Errorf("asked %v", q)
		}
		n.agrees(t, f, everything)
	})
}

// TestNakedVersion: a registrar that has another version and sends no snapshot is not believed to have nothing.
func TestNakedVersion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		f.add("shop/cart", pod("10.0.0.1", healthy, false))
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial, Whole: true})
		defer n.end()
		synctest.Wait()
		f.mu.Lock()
		f.naked, f.silent = true, true
		f.mu.Unlock()
		f.kill("10.0.0.1:8443", errKilled)
		f.start("10.0.0.1:8443")
		n.heard.mu.Lock()
		n.heard.look = func(rows map[model.ServiceName][]string) {
			if len(rows[name("shop/cart")]) != 1 {
				t.Errorf("known: %v", rows)
			}
		}
		n.heard.mu.Unlock()
		pass(time.Minute)
		if q := f.requests(); len(q) != 3 || q[1].GetLastVersion() == "" || q[2].GetLastVersion() != "" {
			t.Errorf("asked %v", q)
		}
		n.agrees(t, f, everything)
	})
}

// TestNewerRegistrar: kinds of events and fields that are not known are ignored, and counted.
func TestNewerRegistrar(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, lines := logged()
		f := newFleet("10.0.0.1:8443")
		f.more = true
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial, Whole: true, Log: log})
		defer n.end()
		synctest.Wait()
		for i := range 20 {
			f.add("shop/cart", pod(fmt.Sprintf("10.0.0.%d", 1+i), healthy, i%2 == 0))
		}
		synctest.Wait()
		n.agrees(t, f, everything)
		if u := n.Unknown.Value(); u < 20 {
			t.Errorf("%d are counted", u)
		}
		if said := strings.Count(lines.String(), "newer than this node"); said != 3 { // of so many kinds
			t.Errorf("said %d times:\n%s", said, lines.String())
		}
	})
}

// TestBadRows: thousands of bad rows among good ones cost themselves alone; each is counted, the first are
// listed, each once in the log (contract 9.3).
func TestBadRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, lines := logged()
		f := newFleet("10.0.0.1:8443")
		f.add("shop/cart", pod("10.0.0.1", healthy, false))
		for i := range 3000 {
			e := pod(fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250), healthy, false)
			delete(e.PortProtocols, 8080)
			f.put(place{"shop/cart", registrypb.Service_PROTOCOL_HTTP, e.Ip}, e)
		}
		f.put(place{"shop", registrypb.Service_PROTOCOL_HTTP, "10.0.0.9"}, pod("10.0.0.9", healthy, false))
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial, Whole: true, Log: log})
		defer n.end()
		synctest.Wait()
		if got := n.heard.of(name("shop/cart")); len(got) != 1 {
			t.Fatalf("%d rows", len(got))
		}
		var unclassed, all uint64
		for i := range n.Malformed {
			v := n.Malformed[i].Value()
			all += v
			unclassed = max(unclassed, v)
		}
		if unclassed != 3000 || all < 3001 {
			t.Errorf("%d of %d are counted", unclassed, all)
		}
		n.heard.mu.Lock()
		listed := len(n.heard.problems)
		for _, p := range n.heard.problems {
			if p.Reason == "" || p.Object == "" {
				t.Errorf("%+v", p)
			}
		}
		n.heard.mu.Unlock()
		if listed != 257 { // and one that says that there are more
			t.Errorf("%d are listed", listed)
		}
		if c := strings.Count(lines.String(), "row not served"); c < 256 || c > 300 {
			t.Errorf("%d lines", c)
		}
		// What is mended is no problem any more, and is not spoken of again with each snapshot.
		counted := n.Malformed[4].Value()
		for range 3 {
			f.cutAll(errLoss)
			pass(time.Minute)
		}
		said := map[string]bool{}
		for line := range strings.Lines(lines.String()) {
			if _, row, ok := strings.Cut(line, `"row not served" `); ok {
				if said[row] {
					t.Errorf("said again: %s", row)
				}
				said[row] = true
			}
		}
		if c := n.Malformed[4].Value(); c != counted {
			t.Errorf("%d are counted after three snapshots more, %d before", c, counted)
		}
		for i := range 3000 {
			f.put(place{"shop/cart", registrypb.Service_PROTOCOL_HTTP, fmt.Sprintf("10.1.%d.%d", i/250, 1+i%250)}, nil)
		}
		f.put(place{"shop", registrypb.Service_PROTOCOL_HTTP, "10.0.0.9"}, nil)
		f.again()
		synctest.Wait()
		n.heard.mu.Lock()
		if len(n.heard.problems) != 0 {
			t.Errorf("still %d problems: %v", len(n.heard.problems), n.heard.problems)
		}
		n.heard.mu.Unlock()
	})
}

// TestInvalidTakesItsPlace: a row that becomes invalid gives nothing any more.
func TestInvalidTakesItsPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		f.add("shop/cart", pod("10.0.0.1", healthy, false))
		f.add("shop/cart", pod("10.0.0.2", healthy, false))
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial, Whole: true})
		defer n.end()
		synctest.Wait()
		e := pod("10.0.0.1", healthy, false)
		e.Ports = nil
		f.put(place{"shop/cart", registrypb.Service_PROTOCOL_HTTP, e.Ip}, e)
		synctest.Wait()
		n.agrees(t, f, everything)
		if got := n.heard.of(name("shop/cart")); len(got) != 1 || !strings.Contains(got[0], "10.0.0.2") {
			t.Errorf("%v", got)
		}
	})
}

// TestSeveralClasses: a pod that serves several classes is one endpoint; while a change has reached one class
// only both rows are told, and REMOVED without a class takes all (contract 9.4, 9.7).
func TestSeveralClasses(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		f.add("shop/cart", pod("10.0.0.1", healthy, true))
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443"}, Dial: f.dial, Whole: true})
		defer n.end()
		count := func(want int, health ...registrypb.ServiceEndpoint_Health) {
			t.Helper()
			synctest.Wait()
			got := n.heard.of(name("shop/cart"))
			if len(got) != want {
				t.Fatalf("%d rows, want %d: %v", len(got), want, got)
			}
			for _, h := range health {
				if !slices.ContainsFunc(got, func(l string) bool { return strings.Contains(l, fmt.Sprintf("health=%d ", h)) }) {
					t.Errorf("none has health %d: %v", h, got)
				}
			}
		}
		count(1, healthy)
		e := pod("10.0.0.1", draining, true)
		f.put(place{"shop/cart", registrypb.Service_PROTOCOL_HTTP, e.Ip}, e)
		count(2, healthy, draining)
		f.put(place{"shop/cart", registrypb.Service_PROTOCOL_TCP, e.Ip}, e)
		count(1, draining)
		f.put(place{"shop/cart", registrypb.Service_PROTOCOL_TCP, e.Ip}, nil)
		count(1, draining)
		f.put(place{"shop/cart", registrypb.Service_PROTOCOL_TCP, e.Ip}, e)
		count(1, draining)
		f.gone("shop/cart", e.Ip)
		count(0)
	})
}

// TestCountedVersions: registrars that count their versions, as upstream's, can come to the same number with
// other contents: such a version is not asked to be gone on from, wherever.
func TestCountedVersions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet("10.0.0.1:8443")
		f.counts = true
		f.add("shop/cart", pod("10.0.0.1", healthy, false))
		n := startNode(t, client.Config{Targets: []string{"10.0.0.1:8443", "10.0.0.2:8443"}, Dial: f.dial, Whole: true})
		defer n.end()
		pass(time.Minute)
		f.kill("10.0.0.1:8443", errKilled)
		f.add("shop/cart", pod("10.0.0.2", healthy, false))
		f.put(place{"shop/cart", registrypb.Service_PROTOCOL_HTTP, "10.0.0.1"}, nil)
		f.start("10.0.0.2:8443")
		pass(time.Minute)
		n.agrees(t, f, everything)
		f.kill("10.0.0.2:8443", errKilled)
		f.add("shop/cart", pod("10.0.0.3", healthy, false))
		f.start("10.0.0.2:8443") // the same address, another life
		pass(2 * time.Minute)
		n.agrees(t, f, everything)
		for i, q := range f.requests() {
			if q.GetLastVersion() != "" {
				t.Errorf("request %d goes on from %q", i, q.GetLastVersion())
			}
		}
	})
}
