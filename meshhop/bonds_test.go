package meshhop

import (
	"crypto/x509"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"aether/e2e/testseed"
	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/spiffeid"
)

// ring is the identities of a test, and the pod whose sessions are held.
type ring struct {
	t  *testing.T
	ca *devca.CA
	s  Bonds

	mu  sync.Mutex
	own *mtls.SVID
}

func newRing(t *testing.T, own time.Duration) *ring {
	t.Helper()
	ca, err := devca.Open(t.TempDir(), "td", nil)
	if err != nil {
		t.Fatal(err)
	}
	r := &ring{t: t, ca: ca}
	r.own = r.issue(ca, "cart", own)
	return r
}

func (r *ring) issue(ca *devca.CA, name string, life time.Duration) *mtls.SVID {
	r.t.Helper()
	s, err := ca.Issue(id(name), life)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

func id(name string) spiffeid.ID {
	v, err := spiffeid.Parse("spiffe://td/ns/shop/sa/" + name)
	if err != nil {
		panic(err)
	}
	return v
}

func (r *ring) svid() *mtls.SVID {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.own
}

// rotate gives the pod another certificate.
func (r *ring) rotate(s *mtls.SVID) {
	r.mu.Lock()
	r.own = s
	r.mu.Unlock()
	r.s.Rotated("cart")
}

// bond is what a handshake of now shows, in which the peer has peer.
func (r *ring) bond(peer *mtls.SVID) *mtls.Bond {
	r.t.Helper()
	leaf, err := x509.ParseCertificate(peer.Cert.Certificate[0])
	if err != nil {
		r.t.Fatal(err)
	}
	return &mtls.Bond{Own: r.svid(), Peer: []*x509.Certificate{leaf}, Use: x509.ExtKeyUsageClientAuth}
}

// meet is a handshake with name at addr.
func (r *ring) meet(ca *devca.CA, name, addr string, life time.Duration) {
	r.s.Verified("cart", from(addr, name), r.bond(r.issue(ca, name, life)), r.svid, true)
}

func from(addr, name string) Peer {
	return Peer{netip.AddrPortFrom(netip.MustParseAddr(addr), 0), id(name)}
}

// trusting is s with the bundle of those authorities.
func (r *ring) trusting(s *mtls.SVID, cas ...*devca.CA) *mtls.SVID {
	v := *s
	v.Roots = x509.NewCertPool()
	for _, ca := range cas {
		for _, c := range r.issue(ca, "any", time.Hour).Authorities {
			v.Roots.AddCert(c)
		}
	}
	return &v
}

// ended is a session's end: when, and of what.
type ended struct {
	mu    sync.Mutex
	after time.Duration // of the beginning; 0: it goes on
	cause error
}

func (e *ended) end(since time.Time) func(error) {
	return func(err error) {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.after == 0 {
			e.after, e.cause = time.Since(since), err
		}
	}
}

// TestSessionEnds: what moves a session's end, and what does not. The certificate of one of its ends is for two hours
// at the beginning, the other's for ten; everything is said after one.
func TestSessionEnds(t *testing.T) {
	const short, long = 2 * time.Hour, 10 * time.Hour
	for name, tt := range map[string]struct {
		own   bool // the pod's own certificate is the short one
		then  func(r *ring, fresh *devca.CA)
		after time.Duration
		gone  bool // because it is trusted no more
	}{
		"neither is renewed":                 {after: short},
		"neither is renewed, own ends first": {own: true, after: short},
		"the peer is met with a newer one":   {then: func(r *ring, _ *devca.CA) { r.meet(r.ca, "web", "10.0.0.1", 3*time.Hour) }, after: 4 * time.Hour},
		"another identity is met there":      {then: func(r *ring, _ *devca.CA) { r.meet(r.ca, "other", "10.0.0.1", long) }, after: short},
		"the identity is met elsewhere":      {then: func(r *ring, _ *devca.CA) { r.meet(r.ca, "web", "10.0.0.2", long) }, after: short},
		"an earlier end is met":              {then: func(r *ring, _ *devca.CA) { r.meet(r.ca, "web", "10.0.0.1", 30*time.Minute) }, after: short},
		"newer ones, and then an older one": {then: func(r *ring, _ *devca.CA) {
			r.meet(r.ca, "web", "10.0.0.1", 3*time.Hour)
			r.meet(r.ca, "web", "10.0.0.1", 2*time.Hour)
		}, after: 4 * time.Hour},
		"the newer one is of an authority that is not trusted": {then: func(r *ring, fresh *devca.CA) {
			// The handshake was verified by a bundle that has been replaced since.
			b := r.bond(r.issue(fresh, "web", long))
			b.Own = r.trusting(r.svid(), r.ca, fresh)
			r.s.Verified("cart", from("10.0.0.1", "web"), b, r.svid, true)
		}, after: short},
		"the authority of the newer one is removed while it is judged": {then: func(r *ring, fresh *devca.CA) {
			r.rotate(r.trusting(r.svid(), r.ca, fresh))
			b := r.bond(r.issue(fresh, "web", long))
			judged := false
			r.s.Verified("cart", from("10.0.0.1", "web"), b, func() *mtls.SVID {
				now := r.svid()
				if !judged {
					judged = true
					r.rotate(r.trusting(now, r.ca))
				}
				return now
			}, true)
		}, after: short},
		"the newer one is of another identity": {then: func(r *ring, _ *devca.CA) {
			r.s.Verified("cart", from("10.0.0.1", "web"), r.bond(r.issue(r.ca, "other", long)), r.svid, true)
		}, after: short},
		"the peer's newer one is for another use": {then: func(r *ring, _ *devca.CA) {
			b := r.bond(r.issue(r.ca, "web", long))
			b.Use = x509.ExtKeyUsageServerAuth
			r.s.Verified("cart", from("10.0.0.1", "web"), b, r.svid, true)
		}, after: short},
		"the peer's is renewed, own ends first": {own: true, then: func(r *ring, _ *devca.CA) { r.meet(r.ca, "web", "10.0.0.1", 2*long) }, after: short},
		"own is renewed":                        {own: true, then: func(r *ring, _ *devca.CA) { r.rotate(r.issue(r.ca, "cart", 3*time.Hour)) }, after: 4 * time.Hour},
		"own is renewed, the peer's ends first": {then: func(r *ring, _ *devca.CA) { r.rotate(r.issue(r.ca, "cart", 2*long)) }, after: short},
		"own becomes another identity":          {own: true, then: func(r *ring, _ *devca.CA) { r.rotate(r.issue(r.ca, "other", long)) }, after: short},
		"own becomes one that ends earlier":     {own: true, then: func(r *ring, _ *devca.CA) { r.rotate(r.issue(r.ca, "cart", 30*time.Minute)) }, after: short},
		"own becomes one that its bundle does not know": {own: true, then: func(r *ring, fresh *devca.CA) {
			r.rotate(r.trusting(r.issue(fresh, "cart", long), r.ca))
		}, after: short},
		"own goes": {own: true, then: func(r *ring, _ *devca.CA) { r.rotate(nil) }, after: short},
		"both are renewed": {then: func(r *ring, _ *devca.CA) {
			r.rotate(r.issue(r.ca, "cart", 2*long))
			r.meet(r.ca, "web", "10.0.0.1", 12*time.Hour)
		}, after: 13 * time.Hour},
		"the peer's authority is removed": {then: func(r *ring, fresh *devca.CA) { r.rotate(r.issue(fresh, "cart", long)) }, after: time.Hour, gone: true},
		"the peer is renewed by another authority, and the old one removed": {then: func(r *ring, fresh *devca.CA) {
			r.rotate(r.trusting(r.issue(fresh, "cart", long), r.ca, fresh))
			r.meet(fresh, "web", "10.0.0.1", 3*time.Hour)
			r.rotate(r.trusting(r.svid(), fresh))
		}, after: 4 * time.Hour},
		"the peer is renewed, and its newer authority removed": {then: func(r *ring, fresh *devca.CA) {
			r.rotate(r.trusting(r.svid(), r.ca, fresh))
			r.meet(fresh, "web", "10.0.0.1", 3*time.Hour)
			r.rotate(r.trusting(r.svid(), r.ca))
		}, after: time.Hour, gone: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				mine, theirs := long, short
				if tt.own {
					mine, theirs = short, long
				}
				r := newRing(t, mine)
				fresh, err := devca.Open(t.TempDir(), "td", nil)
				if err != nil {
					t.Fatal(err)
				}
				var e ended
				k := r.s.Hold(Holding{Pod: "cart", Peer: from("10.0.0.1", "web"), Bond: r.bond(r.issue(r.ca, "web", theirs)), SVID: r.svid, End: e.end(time.Now())})
				k.Watch()
				defer k.Release()
				time.Sleep(time.Hour)
				if tt.then != nil {
					tt.then(r, fresh)
				}
				time.Sleep(14 * time.Hour)
				synctest.Wait()
				e.mu.Lock()
				defer e.mu.Unlock()
				if d := e.after - tt.after; e.after == 0 || d < -2*time.Second || d > 2*time.Second { // certificates count in whole seconds
					t.Errorf("it ended after %v (%v), want %v", e.after, e.cause, tt.after)
				}
				if errors.Is(e.cause, ErrExpired) == tt.gone {
					t.Errorf("of %v", e.cause)
				}
			})
		})
	}
}

// TestSessionEndsAtRandom: of many sessions, with handshakes of many peers and renewals of the own certificate in between, each
// ends at the earlier of the latest that its own identity and its very peer have shown, and nothing is kept of them then.
func TestSessionEndsAtRandom(t *testing.T) {
	seed := testseed.Seed(t)
	synctest.Test(t, func(t *testing.T) {
		rnd := rand.New(rand.NewPCG(seed, 0))
		r := newRing(t, 2*time.Hour)
		addrs, names := []string{"10.0.0.1", "10.0.0.2"}, []string{"web", "api"}
		life := func() time.Duration { return time.Duration(20+rnd.IntN(160)) * time.Minute }
		type session struct {
			e         ended
			from      Peer
			own, peer time.Time
			begun     time.Time
			k         *Held
			over      bool
			want      time.Duration
		}
		var all []*session
		// What the oracle knows: renewed at a time when the session has not ended.
		each := func(f func(s *session)) {
			for _, s := range all {
				end := s.own
				if s.peer.Before(end) {
					end = s.peer
				}
				if !s.over && !time.Now().Before(end) {
					s.over, s.want = true, end.Sub(s.begun)
				}
				if !s.over {
					f(s)
				}
			}
		}
		for range 400 {
			time.Sleep(time.Duration(rnd.IntN(600)) * time.Second)
			synctest.Wait()
			at, name := addrs[rnd.IntN(2)], names[rnd.IntN(2)]
			switch n := rnd.IntN(10); {
			case n < 2:
				v := r.issue(r.ca, "cart", life())
				r.rotate(v)
				each(func(s *session) {
					if v.NotAfter.After(s.own) {
						s.own = v.NotAfter
					}
				})
			case n < 6 && time.Now().Before(r.svid().NotAfter):
				v := r.issue(r.ca, name, life())
				s := &session{from: from(at, name), own: r.svid().NotAfter, peer: v.NotAfter, begun: time.Now()}
				s.k = r.s.Hold(Holding{Pod: "cart", Peer: s.from, Bond: r.bond(v), SVID: r.svid, End: s.e.end(s.begun)})
				s.k.Watch()
				all = append(all, s)
			default:
				v := r.issue(r.ca, name, life())
				r.s.Verified("cart", from(at, name), r.bond(v), r.svid, true)
				each(func(s *session) {
					if s.from == from(at, name) && v.NotAfter.After(s.peer) {
						s.peer = v.NotAfter
					}
				})
			}
		}
		time.Sleep(24 * time.Hour)
		synctest.Wait()
		each(func(*session) {})
		for i, s := range all {
			if d := s.e.after - s.want; s.e.after == 0 || d < 0 || d > 2*time.Second {
				t.Errorf("session %d ended after %v, want %v", i, s.e.after, s.want)
			}
			s.k.Release()
		}
		if len(all) < 50 || len(r.s.pods) != 0 {
			t.Errorf("%d sessions; %d pods are kept", len(all), len(r.s.pods))
		}
	})
}

// TestRenewals: a session that this node opened is renewed in time, by one handshake for all with that peer, and as often as it
// takes; a peer that is not there, or has not renewed its certificate, is not asked all the time.
func TestRenewals(t *testing.T) {
	const life = 2 * time.Hour
	for name, tt := range map[string]struct {
		busy, answers, told, rotates bool
		lasts                        bool
		least, most                  int // handshakes
	}{
		"both rotate":                        {busy: true, answers: true, told: true, rotates: true, lasts: true, least: 5, most: 40},
		"the peer does not confirm":          {busy: true, answers: true, rotates: true, lasts: true, least: 5, most: 400},
		"nothing is under way":               {answers: true, told: true, rotates: true},
		"the peer does not answer":           {busy: true, rotates: true, least: 5, most: 20},
		"the peer has still its certificate": {busy: true, answers: true, told: true, least: 5, most: 20},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRing(t, life)
				peer := r.issue(r.ca, "web", life)
				begun := time.Now()
				n, now := 0, 0
				var mu sync.Mutex
				renew := func(done func(*mtls.Bond, bool, error)) {
					mu.Lock()
					defer mu.Unlock()
					if n, now = n+1, now+1; now > 1 {
						t.Error("two renewals at once")
					}
					b := r.bond(peer)
					go func() {
						time.Sleep(time.Second)
						mu.Lock()
						now--
						mu.Unlock()
						if !tt.answers {
							done(nil, false, errors.New("nobody is there"))
							return
						}
						done(b, tt.told, nil)
					}()
				}
				var es [20]ended
				var held []*Held
				stop := make(chan struct{})
				for i := range es {
					k := r.s.Hold(Holding{Pod: "cart", Peer: from("10.0.0.1", "web"), Bond: r.bond(peer), SVID: r.svid, End: es[i].end(begun), Renew: renew})
					held = append(held, k)
					if tt.busy {
						k.Watch()
						continue
					}
					go func() { // as an idle HTTP session's loop does
						for again := k.Ask(false); ; again = k.Ask(false) {
							if k.Left() <= 0 {
								k.End(ErrExpired)
								return
							}
							select {
							case <-time.After(again):
							case <-stop:
								return
							}
						}
					}()
				}
				for range 10 { // five lives, each end at half of its own
					if tt.rotates {
						if time.Sleep(life / 4); true {
							mu.Lock()
							peer = r.issue(r.ca, "web", life)
							mu.Unlock()
						}
						time.Sleep(life / 4)
						r.rotate(r.issue(r.ca, "cart", life))
						continue
					}
					time.Sleep(life / 2)
				}
				synctest.Wait()
				for i := range es {
					es[i].mu.Lock()
					if got := es[i].after; (got == 0) != tt.lasts || !tt.lasts && (got < life-2*time.Second || got > life+2*time.Second) {
						t.Errorf("session %d ended after %v (%v)", i, got, es[i].cause)
					}
					es[i].mu.Unlock()
				}
				mu.Lock()
				if n < tt.least || n > tt.most {
					t.Errorf("%d renewals, want %d to %d", n, tt.least, tt.most)
				}
				mu.Unlock()
				close(stop)
				for _, k := range held {
					k.Release()
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				if len(r.s.pods) != 0 {
					t.Errorf("%d pods are kept", len(r.s.pods))
				}
			})
		})
	}
}

// TestRenewalsOfAPod: a pod with sessions to many peers renews a few at once, and all of them in time.
func TestRenewalsOfAPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const peers = 300
		r := newRing(t, time.Hour)
		fresh := r.issue(r.ca, "web", 3*time.Hour)
		peer := r.issue(r.ca, "web", time.Hour)
		r.rotate(r.issue(r.ca, "cart", 3*time.Hour))
		var mu sync.Mutex
		now, most := 0, 0
		var es [peers]ended
		var held []*Held
		for i := range peers {
			k := r.s.Hold(Holding{Pod: "cart", Peer: from(fmt.Sprintf("10.0.%d.%d", i/250, i%250), "web"), Bond: r.bond(peer), SVID: r.svid, End: es[i].end(time.Now()),
				Renew: func(done func(*mtls.Bond, bool, error)) {
					mu.Lock()
					now++
					most = max(most, now)
					mu.Unlock()
					b := r.bond(fresh)
					time.AfterFunc(30*time.Second, func() {
						mu.Lock()
						now--
						mu.Unlock()
						done(b, true, nil)
					})
				}})
			k.Watch()
			held = append(held, k)
		}
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		for i := range es {
			if es[i].after != 0 {
				t.Errorf("session %d ended after %v", i, es[i].after)
			}
		}
		if most > podRenewals || most < podRenewals/2 {
			t.Errorf("%d at once, want some %d", most, podRenewals)
		}
		for _, k := range held {
			k.Release()
		}
	})
}

// TestBondAsked: what loops ask of a session allocates nothing.
func TestBondAskedAllocs(t *testing.T) {
	r := newRing(t, time.Hour)
	k := r.s.Hold(Holding{Pod: "cart", Peer: from("10.0.0.1", "web"), Bond: r.bond(r.issue(r.ca, "web", time.Hour)), SVID: r.svid, End: func(error) {}, Renew: func(func(*mtls.Bond, bool, error)) {}})
	defer k.Release()
	if n := testing.AllocsPerRun(100, func() { k.Left(); k.Ask(true) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// TestSessionsShareCertificates: sessions of the same certificates keep one parsed chain, each of others its own.
func TestSessionsShareCertificates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRing(t, time.Hour)
		peer, other := r.issue(r.ca, "web", time.Hour), r.issue(r.ca, "web", 2*time.Hour)
		hold := func(b *mtls.Bond) *Held {
			h := r.s.Hold(Holding{Pod: "cart", Peer: from("10.0.0.1", "web"), Bond: b, SVID: r.svid, End: func(error) {}})
			t.Cleanup(h.Release)
			return h
		}
		one, two := hold(r.bond(peer)), hold(r.bond(peer))
		if one.bond != two.bond {
			t.Error("two sessions of the same certificates keep two bonds")
		}
		renewed := hold(r.bond(other))
		if renewed.bond == one.bond || !renewed.bond.PeerEnd().After(one.bond.PeerEnd()) {
			t.Error("a session of another certificate has the bond of those before")
		}
		r.rotate(r.issue(r.ca, "cart", 3*time.Hour))
		b := r.bond(other)
		if mine := hold(b); mine.bond.Own != b.Own {
			t.Error("a session of another certificate of the pod has the bond of those before")
		}
	})
}
