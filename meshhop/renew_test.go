package meshhop

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"aether/mtls"
	"aether/mtls/devca"
	"aether/mtls/record"
)

// TestRenew: what a renewal handshake is worth, by who answers it.
func TestRenew(t *testing.T) {
	serve := func(t *testing.T, r *rig, alpn []string, after func(c *tls.Conn)) netip.AddrPort {
		t.Helper()
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			c, err := ln.Accept()
			if err != nil {
				return
			}
			defer c.Close()
			s := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{r.cart.Load().Cert}, ClientAuth: tls.RequireAnyClientCert, NextProtos: alpn, SessionTicketsDisabled: true})
			if s.Handshake() == nil {
				after(s)
			}
		}()
		t.Cleanup(func() { ln.Close(); <-done })
		return netip.MustParseAddrPort(ln.Addr().String())
	}
	hangUp := func(c *tls.Conn) { c.Close() }
	drop := func(c *tls.Conn) { c.NetConn().Close() }
	stay := func(c *tls.Conn) { io.Copy(io.Discard, c.NetConn()) }
	for name, tt := range map[string]struct {
		alpn  []string
		after func(c *tls.Conn) // nil: a destination of this package
		mod   func(t *testing.T, r *rig)
		told  bool
		fails bool
	}{
		"a destination that knows of it":   {told: true},
		"an Envoy-based one: no protocol":  {after: stay, told: true},
		"one that takes it for HTTP/2":     {alpn: []string{"h2"}, after: stay},
		"one that does not know of either": {alpn: []string{"other"}, after: stay, fails: true},
		"it confirms with close_notify":    {alpn: []string{mtls.RenewALPN}, after: hangUp, told: true},
		"it ends without close_notify":     {alpn: []string{mtls.RenewALPN}, after: drop, fails: true},
		"it stays":                         {alpn: []string{mtls.RenewALPN}, after: stay, fails: true},
		"it sends data":                    {alpn: []string{mtls.RenewALPN}, after: func(c *tls.Conn) { c.Write([]byte("x")); c.Close() }, fails: true},
		"it is another":                    {mod: func(t *testing.T, r *rig) { r.cart.Store(r.issue(t, "other")) }, fails: true},
		"it has no certificate":            {mod: func(_ *testing.T, r *rig) { r.cart.Store(nil) }, fails: true},
		"it does not trust us": {mod: func(t *testing.T, r *rig) {
			ca, err := devca.Open(t.TempDir(), "mesh.test", nil)
			if err != nil {
				t.Fatal(err)
			}
			s, err := ca.Issue(r.web.Load().ID, time.Hour)
			if err != nil {
				t.Fatal(err)
			}
			s.Roots = r.ca.Roots()
			r.web.Store(s)
		}, fails: true},
	} {
		for _, m := range []record.Maker{record.Std, record.Own} {
			t.Run(name, func(t *testing.T) {
				r := newRig(t, m, 0)
				r.dialer.Handshake = 2 * time.Second
				k := r.key(Raw) // Renew minds neither protocol nor port
				k.SNI = "1"
				if tt.after != nil {
					k.Endpoint = serve(t, r, tt.alpn, tt.after)
				}
				if tt.mod != nil {
					tt.mod(t, r)
				}
				confirmed := make(chan struct{})
				if tt.after == nil {
					go func() {
						defer close(confirmed)
						if got := <-r.in; got.err == nil {
							if got.in.ALPN != mtls.RenewALPN || got.in.Caller != r.web.Load().ID {
								t.Errorf("accepted %q of %s", got.in.ALPN, got.in.Caller)
							}
							if err := got.in.Confirm(); err != nil {
								t.Error(err)
							}
						}
					}()
				} else {
					close(confirmed)
				}
				b, told, err := r.dialer.Renew(t.Context(), k)
				<-confirmed
				if told != tt.told || (err != nil) != tt.fails || (b == nil) != tt.fails {
					t.Errorf("%v, told %v, %v", b, told, err)
				}
			})
		}
	}
}

// TestRenewTakesATurn: renewals are among the handshakes that are bounded.
func TestRenewTakesATurn(t *testing.T) {
	r := newRig(t, record.Std, 0)
	r.dialer.Limit = NewLimiter(LimiterConfig{Node: 1, Pod: 1, Queue: 1})
	turn, err := r.dialer.Limit.Enter(t.Context(), "web-1", netip.Addr{})
	if err != nil {
		t.Fatal(err)
	}
	defer turn.Leave()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, _, err := r.dialer.Renew(ctx, r.key(H2)); ReasonOf(err) != ReasonBusy {
		t.Errorf("%v, want to wait for a turn", err)
	}
}
