package meshhop

import (
	"strings"
	"testing"
	"time"

	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/record"
	"aether/mtls/spiffeid"
)

// TestMeet: two pods of one process know of each other what a handshake would have shown, and are refused
// what it would refuse, for the same reason: the oracle is Dial with Accept.
func TestMeet(t *testing.T) {
	other := func(t *testing.T) *devca.CA {
		t.Helper()
		ca, err := devca.Open(t.TempDir(), "mesh.test", nil)
		if err != nil {
			t.Fatal(err)
		}
		return ca
	}
	for _, tt := range []struct {
		name string
		mod  func(t *testing.T, r *rig, k *Key)
		want Reason
	}{
		{"good", func(*testing.T, *rig, *Key) {}, ReasonNone},
		{"no certificate", func(_ *testing.T, r *rig, k *Key) { k.Pod = "stranger" }, ReasonNoCertificate},
		{"another's certificate", func(_ *testing.T, r *rig, k *Key) { k.Source = k.Pin }, ReasonWrongPeer},
		{"wrong pin", func(_ *testing.T, r *rig, k *Key) { k.Pin = k.Source }, ReasonWrongPeer},
		{"no pin", func(_ *testing.T, r *rig, k *Key) { k.Pin = spiffeid.ID{} }, ReasonWrongPeer},
		{"unserved port", func(_ *testing.T, r *rig, k *Key) { k.SNI = "9999" }, ReasonUnknownSNI},
		{"no port", func(_ *testing.T, r *rig, k *Key) { k.SNI = "" }, ReasonUnknownSNI},
		{"no certificate there", func(_ *testing.T, r *rig, k *Key) { r.cart.Store(nil) }, ReasonRemote},
		{"untrusted there", func(t *testing.T, r *rig, k *Key) {
			s, err := other(t).Issue(k.Pin, time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			r.cart.Store(s)
		}, ReasonUntrusted},
		{"untrusted here", func(t *testing.T, r *rig, k *Key) {
			s, err := other(t).Issue(k.Source, time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			s.Roots = r.ca.Roots()
			r.web.Store(s)
		}, ReasonRemote},
		{"expired there", func(t *testing.T, r *rig, k *Key) {
			r.dialer.Now = func() time.Time { return time.Now().Add(2 * time.Hour) }
		}, ReasonExpired},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(t, record.Std, 0)
			k := r.key(H2)
			tt.mod(t, r, &k)
			m, err := r.dialer.VerifyLocal(t.Context(), k, r.local)
			if got := ReasonOf(err); got != tt.want || (m == nil) != (err != nil) {
				t.Errorf("VerifyLocal: %v (%s), want %s", err, got, tt.want)
			}
			s, err := r.dialer.Dial(t.Context(), k)
			if err == nil {
				defer s.Conn.Close()
			}
			if tt.want == ReasonRemote && err == nil { // judged after our own handshake was over
				if got := <-r.in; got.err == nil {
					t.Error("Accept took it")
				}
				return
			}
			if got := ReasonOf(err); got != tt.want {
				t.Errorf("Dial: %v (%s), want %s", err, got, tt.want)
			}
			if tt.want != ReasonNone {
				return
			}
			in := (<-r.in).in
			defer in.Conn.Close()
			if m.Caller != in.Caller || m.Port != in.Port || m.XFCC != in.XFCC || !m.Peer.Equal(in.Peer) || !m.NotAfter.Equal(s.NotAfter) {
				t.Errorf("met as %+v; the handshake shows %+v", m, in)
			}
		})
	}
}

// TestMetStaysFresh: a meeting holds for as long as both certificates are those it was made with.
func TestMetStaysFresh(t *testing.T) {
	served := true
	for _, tt := range []struct {
		name   string
		change func(r *rig)
		want   bool
	}{
		{"nothing", func(*rig) {}, true},
		{"the source's rotates", func(r *rig) { r.web.Store(r.issue(t, "web")) }, false},
		{"the destination's rotates", func(r *rig) { r.cart.Store(r.issue(t, "cart")) }, false},
		{"the source's is gone", func(r *rig) { r.web.Store(nil) }, false},
		{"the destination's is gone", func(r *rig) { r.cart.Store(nil) }, false},
		{"the port is not served any more", func(*rig) { served = false }, false},
	} {
		r := newRig(t, record.Std, 0)
		served = true
		r.local.TLS = mtls.ServerConfig(mtls.Server{Pod: "cart-1", SVID: r.cart.Load, Serves: func(uint16) bool { return served }})
		m, err := r.dialer.VerifyLocal(t.Context(), r.key(H2), r.local)
		if err != nil {
			t.Fatal(err)
		}
		tt.change(r)
		if got := m.Fresh(); got != tt.want {
			t.Errorf("%s: fresh %v", tt.name, got)
		}
		if n := testing.AllocsPerRun(100, func() { m.Fresh() }); tt.want && n != 0 {
			t.Errorf("%v allocations", n)
		}
	}
}

// TestDeclinedTells: what the source reads does not say what the destination's reason is, and the error does.
func TestDeclinedTells(t *testing.T) {
	r := newRig(t, record.Std, 0)
	k := r.key(H2)
	r.cart.Store(nil)
	_, err := r.dialer.VerifyLocal(t.Context(), k, r.local)
	if ReasonOf(err) != ReasonRemote || !strings.Contains(err.Error(), "cart-1") {
		t.Errorf("%v (%s)", err, ReasonOf(err))
	}
}
