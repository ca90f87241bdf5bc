package dataplane_test

import (
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestGoneBeforeAccept: a peer that resets its connection before it is accepted has no address
// any more. It costs nothing but its own connection, on either side's listeners.
func TestGoneBeforeAccept(t *testing.T) {
	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.apply("service shop/web 127.0.0.2\nlocal shop/web cid=web")
	for _, accept := range []string{"inbound", "proxy"} {
		fd, _ := here{}.Get(false)
		t.Cleanup(func() { unix.Close(fd) })
		if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			t.Fatal(err)
		}
		if err := unix.Listen(fd, 64); err != nil {
			t.Fatal(err)
		}
		sa, err := unix.Getsockname(fd)
		if err != nil {
			t.Fatal(err)
		}
		to := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: sa.(*unix.SockaddrInet4).Port}
		for range 5 {
			c, err := net.DialTCP("tcp", nil, to)
			if err != nil {
				t.Fatal(err)
			}
			_ = c.SetLinger(0)
			c.Close()
		}
		f := w.out.AcceptProxy(web)
		if accept == "inbound" {
			f = w.in.Accept(w.inbounds["web"])
		}
		if err := web.Engine.Listen(fd, f); err != nil {
			t.Fatal(err)
		}
		for range 5 { // each is told to the journal
			select {
			case e := <-w.journal.ch:
				if e.Status != 0 {
					t.Errorf("%s: %s", accept, e.String())
				}
			case <-time.After(20 * time.Second):
				t.Fatalf("%s: not all connections came to an end", accept)
			}
		}
	}
}
