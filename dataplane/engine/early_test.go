package engine

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

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
