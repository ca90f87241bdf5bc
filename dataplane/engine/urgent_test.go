package engine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"

	"golang.org/x/sys/unix"
)

// TestUrgentBytes: a byte of urgent data is part of the message that it stands in, and what
// lies behind it is read, though no event tells of it: a read stops before the byte.
func TestUrgentBytes(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	v := &svc{pod: pod, to: s.app(func(c *net.TCPConn) {
		req, err := http.ReadRequest(bufio.NewReader(c))
		if err != nil {
			return
		}
		b, _ := io.ReadAll(req.Body)
		fmt.Fprintf(c, "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(b)+2, b[:1])
		urge(t, c, b[1:2])
		fmt.Fprintf(c, "%s..", b[2:])
	})}
	addr := s.front(pod, v, false)
	in, out := make(chan struct{}), make(chan struct{})
	c := dial(t, addr)
	fmt.Fprint(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 7\r\n\r\n")
	eventually(t, "the head has been read", func() bool { return v.begun.Load() == 1 })
	if err := s.e.Loops()[0].Post(func() { close(in); <-out }); err != nil { // all of it is there when the loop looks
		t.Fatal(err)
	}
	<-in
	fmt.Fprint(c, "abc")
	urge(t, c, []byte("!"))
	fmt.Fprint(c, "def")
	close(out)
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(res.Body); string(b) != "abc!def.." || err != nil {
		t.Errorf("%q, %v", b, err)
	}
}

// urge sends p, its last byte as urgent data.
func urge(t *testing.T, c *net.TCPConn, p []byte) {
	t.Helper()
	raw, err := c.SyscallConn()
	if err == nil {
		err = raw.Control(func(fd uintptr) { _, err = unix.SendmsgN(int(fd), p, nil, nil, unix.MSG_OOB) })
	}
	if err != nil {
		t.Error(err)
	}
}
