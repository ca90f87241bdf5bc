package meshhop

import (
	"errors"
	"math/rand/v2"
	"net/netip"
	"sync"
	"time"

	"aether/mtls"
	"aether/mtls/spiffeid"
)

const (
	podRenewals = 16                     // renewal handshakes of one pod at once
	renewPause  = 500 * time.Millisecond // at least, between two of one pod with one peer, or looks for a place among the pod's
)

// ErrExpired: the certificate of one of a session's ends has ended, and the session with it.
var ErrExpired = errors.New("meshhop: the certificates of the session's ends have expired")

// Peer is who is at the other end of a pod's sessions: an address, and the identity that was verified there.
// Its sessions are renewed together.
type Peer struct {
	Addr netip.AddrPort // of an endpoint; of a caller the port is 0
	ID   spiffeid.ID
}

// Peer is who answers for k.
func (k Key) Peer() Peer { return Peer{k.Endpoint, k.Pin} }

// Bonds hold sessions to the certificates of both their ends (mtls.Bond, decisions 053 and 060).
//
//   - A session ends when the certificate of either end does, and when the pod's bundle trusts one of them no more.
//   - Its own end moves with the pod's certificate, if the identity is the same.
//   - Its peer's end moves with a later handshake with the same Peer that was verified in full, never backwards.
//   - What is kept is one entry a session, and one a Peer that has a session.
//
// The zero value is usable. Safe for concurrent use.
type Bonds struct {
	Now func() time.Time // nil: time.Now; not changed once it is used

	mu   sync.Mutex
	pods map[string]*podBonds // those that have sessions
}

// podBonds are a pod's sessions; guarded by Bonds.mu.
type podBonds struct {
	peers    map[Peer]*peerBonds
	renewals int        // under way
	sound    *mtls.SVID // the pod's certificate that was last found so
}

// peerBonds are a pod's sessions with one peer; guarded by Bonds.mu.
type peerBonds struct {
	pod  *podBonds
	name string
	peer Peer
	all  map[*Held]struct{}
	// No session's peer, as it is known here, ends before ends; and none's own, as the peer knows it, before told.
	ends, told time.Time
	newest     *mtls.Bond // of the session that came last: those of the same certificates share it
	renewing   bool
	tried      time.Time // when a renewal began last
}

// Session of a pod, as Bonds are to hold it.
type Holding struct {
	Pod  string
	Peer Peer
	Bond *mtls.Bond        // what it was opened with
	SVID func() *mtls.SVID // the pod's current certificate; nil where it is not known
	End  func(cause error) // takes the session's end; it must not block, and may be called before Hold returns
	// Renew, of sessions that this node opened, begins a renewal handshake with Peer (Dialer.Renew) and returns; done
	// is called once, from any goroutine. nil: the other end does that.
	Renew func(done func(b *mtls.Bond, told bool, err error))
}

// Held is a session that Bonds hold. Safe for concurrent use.
type Held struct {
	Holding
	s  *Bonds
	of *peerBonds

	// Guarded by s.mu.
	bond  *mtls.Bond  // as it is now
	told  time.Time   // the end of our certificate as the peer knows it
	ends  time.Time   // of what due was worked out for
	due   time.Time   // no renewal before
	timer *time.Timer // of Watch; nil: the holder asks
	over  bool
}

func (s *Bonds) now() time.Time {
	if s.Now == nil {
		return time.Now()
	}
	return s.Now()
}

// Hold holds a session until Release is called.
func (s *Bonds) Hold(h Holding) *Held {
	k := &Held{Holding: h, s: s, bond: h.Bond}
	k.Holding.Bond = nil
	k.told = k.bond.NotAfter()
	if k.bond.Own != nil {
		k.told = k.bond.Own.NotAfter
	}
	s.mu.Lock()
	p := s.pods[h.Pod]
	if p == nil {
		if s.pods == nil {
			s.pods = map[string]*podBonds{}
		}
		p = &podBonds{peers: map[Peer]*peerBonds{}}
		s.pods[h.Pod] = p
	}
	of := p.peers[h.Peer]
	if of == nil {
		of = &peerBonds{pod: p, name: h.Pod, peer: h.Peer, all: map[*Held]struct{}{}, ends: k.bond.PeerEnd(), told: k.told}
		p.peers[h.Peer] = of
	}
	if of.newest == nil || !of.newest.Same(k.bond) {
		of.newest = k.bond
	}
	k.of, k.bond = of, of.newest
	of.all[k] = struct{}{}
	of.lower(k)
	s.mu.Unlock()
	s.judge(k, s.now()) // the certificate may have changed since the handshake, and Rotated did not see this one
	return k
}

// lower takes k into the bounds that are kept of all.
func (of *peerBonds) lower(k *Held) {
	if e := k.bond.PeerEnd(); e.Before(of.ends) {
		of.ends = e
	}
	if k.told.Before(of.told) {
		of.told = k.told
	}
}

// Release ends the hold: the session is over.
func (k *Held) Release() {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if k.over {
		return
	}
	k.over = true
	if k.timer != nil {
		k.timer.Stop()
	}
	delete(k.of.all, k)
	k.s.forget(k.of)
}

// forget lets go of what has no session. mu is held.
func (s *Bonds) forget(of *peerBonds) {
	if len(of.all) > 0 || of.renewing {
		return
	}
	delete(of.pod.peers, of.peer)
	if len(of.pod.peers) == 0 {
		delete(s.pods, of.name)
	}
}

// judge ends k if it holds no more by the pod's certificate and bundle of now, else takes that certificate for its own.
func (s *Bonds) judge(k *Held, at time.Time) {
	for {
		s.mu.Lock()
		b, sound, over := k.bond, k.of.pod.sound, k.over
		s.mu.Unlock()
		if over || k.SVID == nil {
			return
		}
		now := k.SVID()
		err := b.Judge(now, at)
		next := b
		if err == nil {
			own := b.Renews(now)
			if own && now != sound { // once for all sessions
				if own = now.Sound(at) == nil; own {
					sound = now
				}
			}
			next = b.Judged(now, own)
		}
		s.mu.Lock()
		same := k.bond == b
		if same {
			k.bond, k.of.pod.sound = next, sound
		}
		s.mu.Unlock()
		if !same {
			continue // its peer was renewed meanwhile: that is judged, too
		}
		if err != nil {
			k.End(err)
		}
		return
	}
}

// Rotated takes in that a pod has another certificate, or bundle: sessions that hold no more end. It verifies
// in the calling goroutine.
func (s *Bonds) Rotated(pod string) {
	s.mu.Lock()
	var all []*Held
	if p := s.pods[pod]; p != nil {
		for _, of := range p.peers {
			for k := range of.all {
				all = append(all, k)
			}
		}
	}
	s.mu.Unlock()
	at := s.now()
	for _, k := range all {
		s.judge(k, at)
	}
}

// Verified takes in what a handshake of pod with p has shown, which was verified in full; svid is the pod's current
// certificate, nil: it is not known. told: the peer has verified ours. Sessions with p of which either ends earlier go on.
func (s *Bonds) Verified(pod string, p Peer, b *mtls.Bond, svid func() *mtls.SVID, told bool) {
	for {
		s.mu.Lock()
		of := s.of(pod, p)
		news := of != nil && of.news(b, told)
		s.mu.Unlock()
		if !news {
			return
		}
		var now *mtls.SVID
		if svid != nil {
			now = svid()
		}
		if b.Judge(now, s.now()) != nil {
			return
		}
		s.mu.Lock()
		if svid != nil && svid() != now {
			s.mu.Unlock()
			continue // sessions may have been judged by a newer bundle, which b has not been
		}
		if of = s.of(pod, p); of != nil && of.news(b, told) {
			of.renew(b, now, told)
		}
		s.mu.Unlock()
		return
	}
}

// of is what is held of pod's with p; nil: nothing. mu is held.
func (s *Bonds) of(pod string, p Peer) *peerBonds {
	if of := s.pods[pod]; of != nil {
		return of.peers[p]
	}
	return nil
}

// news reports whether b ends later than what a session has. mu is held.
func (of *peerBonds) news(b *mtls.Bond, told bool) bool {
	return b.PeerEnd().After(of.ends) || told && b.Own != nil && b.Own.NotAfter.After(of.told)
}

// renew gives all sessions what b has, which is good by now. mu is held.
func (of *peerBonds) renew(b *mtls.Bond, now *mtls.SVID, told bool) {
	of.ends = b.PeerEnd()
	of.told = b.NotAfter()
	if b.Own != nil {
		of.told = b.Own.NotAfter
	}
	for k := range of.all {
		k.bond = k.bond.RenewPeer(b, now)
		if told && b.Own != nil && b.Own.NotAfter.After(k.told) {
			k.told = b.Own.NotAfter
		}
		of.lower(k)
	}
}

// Left is how long the session may go on, unless a certificate is renewed meanwhile. It does not allocate.
func (k *Held) Left() time.Duration {
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	return k.bond.NotAfter().Sub(k.s.now())
}

// Ask sees to it that the certificates are renewed for a session that is busy, if that is due, and returns
// after how long it is to be called again.
func (k *Held) Ask(busy bool) (again time.Duration) {
	k.s.mu.Lock()
	left := k.bond.NotAfter().Sub(k.s.now())
	if k.Renew == nil || k.over {
		k.s.mu.Unlock()
		return left
	}
	now := k.s.now()
	ends := k.bond.PeerEnd()                       // as both know it
	if k.told.Before(ends) && now.Before(k.told) { // a peer that went on behind told does not mind
		ends = k.told
	}
	if !ends.Equal(k.ends) {
		// Most authorities renew at half of a certificate's life, and pods are not to come all at once.
		k.ends, k.due = ends, now.Add(time.Duration(float64(ends.Sub(now))*(0.65+0.1*rand.Float64())))
	}
	pause := max(ends.Sub(now)/2, renewPause)
	due := k.due
	if tried := k.of.tried; !tried.IsZero() {
		if t := tried.Add(max(ends.Sub(tried)/2, renewPause)); t.After(due) {
			due = t
		}
	}
	begin := false
	switch {
	case now.Before(due):
		pause = due.Sub(now)
	case !busy || k.of.renewing:
	case k.of.pod.renewals >= podRenewals:
		pause = renewPause + rand.N(renewPause)
	default:
		begin = true
		k.of.renewing, k.of.tried = true, now
		k.of.pod.renewals++
	}
	k.s.mu.Unlock()
	if begin {
		k.Renew(k.renewed)
	}
	return max(min(pause, left), 0)
}

// renewed takes the outcome of a renewal. One that failed is tried again by Ask, when half of the time is left that was.
func (k *Held) renewed(b *mtls.Bond, told bool, err error) {
	if err == nil {
		k.s.Verified(k.Pod, k.Peer, b, k.SVID, told)
	}
	k.s.mu.Lock()
	k.of.renewing = false
	k.of.pod.renewals--
	k.s.forget(k.of)
	k.s.mu.Unlock()
}

// Watch ends the session with ErrExpired when a certificate has ended, and renews it until then as one that is always busy: its
// holder has no clock of its own.
func (k *Held) Watch() {
	again := k.Ask(true)
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if !k.over {
		k.timer = time.AfterFunc(again, k.look)
	}
}

// look is Watch by the timer.
func (k *Held) look() {
	again := k.Ask(true)
	if k.Left() <= 0 {
		k.End(ErrExpired)
		return
	}
	k.s.mu.Lock()
	defer k.s.mu.Unlock()
	if !k.over {
		k.timer.Reset(again)
	}
}
