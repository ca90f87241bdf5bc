package relay

import (
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"aether/tproxy/netns"
	"aether/tproxy/netns/netnstest"
)

// far is a connection to a server in another network namespace.
type far struct {
	here, there *net.TCPConn
	ns          *netns.NS
}

// vanish has nothing that the server's machine sends arrive any more, not even an acknowledgement.
func (f *far) vanish(t *testing.T) {
	netnstest.Run(t, f.ns, "ip", "route", "add", "blackhole", "10.99.0.1/32")
}

func farPair(t *testing.T) *far {
	t.Helper()
	near, away := netnstest.New(t), netnstest.New(t)
	netnstest.Veth(t, netnstest.End{NS: near, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.99.0.1/24")}},
		netnstest.End{NS: away, Name: "eth0", Addrs: []netip.Prefix{netip.MustParsePrefix("10.99.0.2/24")}})
	var ln net.Listener
	netnstest.Do(t, away, func() (err error) { ln, err = net.Listen("tcp", "10.99.0.2:0"); return err })
	defer ln.Close()
	f := &far{ns: away}
	netnstest.Do(t, near, func() error {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err == nil {
			f.here = c.(*net.TCPConn)
		}
		return err
	})
	c, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	f.there = c.(*net.TCPConn)
	t.Cleanup(func() { f.here.Close(); f.there.Close() })
	return f
}

// TestPeerThatVanishes: a peer that owes an acknowledgement, of bytes, of a FIN, or of a probe of its closed window,
// is taken for dead, which keepalive, which is for silence, never finds. One that is well and reads nothing stays, for many times as long.
func TestPeerThatVanishes(t *testing.T) {
	const dead = 2 * time.Second
	o := Options{Dead: dead, Patrol: 200 * time.Millisecond}
	for name, tt := range map[string]struct {
		fill, vanishes, fin bool // its window is closed first; it goes; all that it owes is a FIN's acknowledgement
	}{
		"bytes under way":                 {vanishes: true},
		"a FIN under way":                 {vanishes: true, fin: true},
		"behind a closed window":          {vanishes: true, fill: true},
		"a live peer that reads nothing":  {fill: true},
		"a live peer that has said a FIN": {},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			client, a := tcpPair(t)
			f := farPair(t)
			done := make(chan Result, 1)
			go func() { done <- Plain(t.Context(), a, f.here, nil, o) }()
			if _, err := client.Write([]byte("hello")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(f.there, make([]byte, 5)); err != nil {
				t.Fatal(err)
			}
			if tt.fill {
				_ = client.SetWriteDeadline(time.Now().Add(3 * time.Second))
				for b, err := make([]byte, 64<<10), error(nil); err == nil; {
					_, err = client.Write(b)
				}
				_ = client.SetWriteDeadline(time.Time{})
			}
			if tt.vanishes {
				f.vanish(t)
				if tt.fin {
					_ = client.CloseWrite()
				} else if !tt.fill {
					_, _ = client.Write([]byte("into the void"))
				}
				select {
				case r := <-done:
					first := B
					if tt.fin { // the client's end, which was in order, came before
						first = A
					}
					if r.End != Lost || r.First != first {
						t.Errorf("ended by %s as %s: %v", r.First, r.End, r.Err)
					}
				case <-time.After(30 * dead):
					t.Error("it is open still")
				}
				return
			}
			if !tt.fill {
				if err := f.there.CloseWrite(); err != nil {
					t.Fatal(err)
				}
			}
			select {
			case r := <-done:
				t.Errorf("ended by %s as %s: %v", r.First, r.End, r.Err)
			case <-time.After(5 * dead): // that it stays is what is asked
			}
			client.Close()
			f.there.Close()
			<-done
		})
	}
}

// TestIdle: with Options.Idle a relay ends once nothing has moved for so long, and not while something does, either way.
func TestIdle(t *testing.T) {
	for _, talks := range []bool{false, true} {
		clientEnd, a := tcpPair(t)
		b, serverEnd := tcpPair(t)
		const idle = time.Second
		done := make(chan Result, 1)
		start := time.Now()
		go func() { done <- Plain(t.Context(), a, b, nil, Options{Idle: idle}) }()
		for n := 0; talks && n < 20; n++ {
			if _, err := serverEnd.Write([]byte("x")); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(clientEnd, make([]byte, 1)); err != nil {
				t.Fatalf("after %v: %v", time.Since(start), err)
			}
			start = time.Now()
			<-time.After(idle / 8)
		}
		r := <-done
		if r.End != Idle || r.First != Nobody {
			t.Errorf("talks %v: ended by %s as %s: %v", talks, r.First, r.End, r.Err)
		}
		if took := time.Since(start); took < idle-idle/20 {
			t.Errorf("talks %v: ended after %v", talks, took)
		}
	}
}
