package engine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"aether/dataplane/reactor"
)

// TestEarlyAnswerToAStalledUpload (case 65): the application has answered and reads no more. A client that reads only once it
// has written everything gets the answer all the same: what it still sends is read and dropped (RFC 9112 9.6).
func TestEarlyAnswerToAStalledUpload(t *testing.T) {
	s := newStage(t, Config{})
	answer, over := make(chan struct{}), make(chan struct{})
	to := s.app(func(c *net.TCPConn) {
		if _, err := http.ReadRequest(bufio.NewReaderSize(c, 16)); err != nil {
			return
		}
		<-answer
		_, _ = io.WriteString(c, "HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")
		<-over
	})
	defer close(over)
	pod := s.e.AddPod("p")
	c := dial(t, s.front(pod, &svc{pod: pod, to: to}, false))
	const size = 32 << 20
	wrote := make(chan error, 1)
	go func() {
		_, err := fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n", size)
		if err == nil {
			_, err = io.CopyN(c, strings.NewReader(strings.Repeat("x", size)), size)
		}
		wrote <- err
	}()
	eventually(t, "the upload stalls", func() (stalled bool) {
		s.onLoop(func(l *Loop) {
			l.Each(func(src reactor.Source) {
				if c, ok := src.(*h1server); ok {
					stalled = stalled || c.stalled
				}
			})
		})
		return stalled
	})
	close(answer)
	if err := <-wrote; err != nil {
		t.Errorf("the client could not send the rest: %v", err)
	}
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(res.Body); err != nil || res.StatusCode != 413 || string(b) != "big" {
		t.Errorf("%d %q, %v", res.StatusCode, b, err)
	}
}

// TestEarlyAnswerWhenTheShareIsSpent: an application that answers before it has the request, and goes, is heard though its
// pod may read no more in the iteration that finds it gone.
func TestEarlyAnswerWhenTheShareIsSpent(t *testing.T) {
	s := newStage(t, Config{})
	pod := s.e.AddPod("p")
	answer := make(chan struct{})
	v := &svc{pod: pod, to: s.app(heads(func(c *net.TCPConn, _ *bufio.Reader, _ string) bool {
		<-answer
		fmt.Fprint(c, "HTTP/1.1 413 x\r\nConnection: close\r\nContent-Length: 3\r\n\r\nbig")
		reset(c)
		return false
	}))}
	c := dial(t, s.front(pod, v, false))
	fmt.Fprint(c, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n0123456789")
	s.seen(t, func(c *h1client) bool { return c.x != nil && c.x.ReqBytes == 10 && len(c.out) == 0 })
	s.onLoop(func(l *Loop) { // which sees nothing of the end before this has returned
		l.Each(func(src reactor.Source) {
			c, ok := src.(*h1client)
			if !ok {
				return
			}
			close(answer)
			gone := []unix.PollFd{{Fd: int32(c.fd), Events: unix.POLLRDHUP}}
			for gone[0].Revents&unix.POLLHUP == 0 {
				if n, err := unix.Poll(gone, 20_000); err != unix.EINTR && n != 1 {
					t.Errorf("the application does not go: %v", err)
					return
				}
			}
			for !c.sh.readSpent() {
				c.sh.addWork()
			}
			c.out = append(c.l.room(c.out, 1), 'x')
			c.Flush()
			if len(c.out) != 0 {
				t.Error("the write did not fail")
			}
		})
	})
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(res.Body); res.StatusCode != 413 || string(b) != "big" || err != nil {
		t.Errorf("%d %q, %v, want what the application said", res.StatusCode, b, err)
	}
}
