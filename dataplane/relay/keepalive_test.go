package relay

import (
	"io"
	"net"
	"testing"

	"golang.org/x/sys/unix"
)

// Both connections of a relay are probed when silent, and neither is given up for a peer that reads nothing (decision 006).
func TestKeepAlive(t *testing.T) {
	clientEnd, a := tcpPair(t)
	b, serverEnd := tcpPair(t)
	done := make(chan Result, 1)
	go func() { done <- Plain(t.Context(), a, b, nil, Options{}) }()
	io.WriteString(clientEnd, "x")
	if _, err := io.ReadFull(serverEnd, make([]byte, 1)); err != nil { // it is under way
		t.Fatal(err)
	}
	for name, c := range map[string]*net.TCPConn{"a": a, "b": b} {
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		raw.Control(func(fd uintptr) {
			for _, o := range []struct {
				name             string
				level, opt, want int
			}{
				{"SO_KEEPALIVE", unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1},
				{"TCP_KEEPIDLE", unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, 60},
				{"TCP_KEEPINTVL", unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 15},
				{"TCP_KEEPCNT", unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 4},
				{"TCP_USER_TIMEOUT", unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, 0},
				{"TCP_NODELAY", unix.IPPROTO_TCP, unix.TCP_NODELAY, 1},
			} {
				if got, err := unix.GetsockoptInt(int(fd), o.level, o.opt); err != nil || got != o.want {
					t.Errorf("%s of %s is %d, %v; want %d", o.name, name, got, err, o.want)
				}
			}
		})
	}
	clientEnd.Close()
	serverEnd.Close()
	<-done
}
