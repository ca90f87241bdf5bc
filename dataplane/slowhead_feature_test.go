package dataplane_test

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"aether/dataplane/engine"
)

// TestSlowFirstLine (case 46): a head is waited for from its first byte on, whatever
// dribbles in, also while it is not yet known what the client speaks; a connection that
// was opened ahead and says nothing is spared (case 45).
func TestSlowFirstLine(t *testing.T) {
	var now atomic.Int64
	now.Store(int64(time.Hour))
	w := newTownOn(t, engine.Config{Now: now.Load, MaxLoops: 1})
	web := w.pod("web", "web", "web", "127.1.0.9")
	proxy := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply("local shop/web cid=web")

	// settle: the loop has seen all that was sent before; a round of it takes events and posts.
	settle := func() {
		t.Helper()
		for range 10 {
			done := make(chan struct{})
			if err := w.engine.Loops()[0].Post(func() { close(done) }); err != nil {
				t.Fatal(err)
			}
			<-done
		}
	}
	move := func(d time.Duration) {
		t.Helper()
		settle()
		now.Add(int64(d))
		settle()
	}
	open := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", proxy)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return c
	}
	still := func(c net.Conn, when string) {
		t.Helper()
		_ = c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("%s: %v, want a connection that is open", when, err)
		}
	}
	silent, slow := open(), open()
	for _, b := range "GET /x" { // a byte every six seconds; from the 18th second on it is HTTP/1, whose head has 15
		still(slow, "while it dribbles")
		io.WriteString(slow, string(b))
		move(6 * time.Second)
	}
	_ = slow.SetReadDeadline(time.Now().Add(20 * time.Second))
	if res, err := http.ReadResponse(bufio.NewReader(slow), nil); err != nil || res.StatusCode != 408 {
		t.Errorf("after 36 s: %v, %v, want 408", res, err)
	}
	still(silent, "a connection that was opened ahead")
	move(5 * time.Minute)
	_ = silent.SetReadDeadline(time.Now().Add(20 * time.Second))
	if b, err := io.ReadAll(silent); err != nil || len(b) > 0 {
		t.Errorf("the silent one: %q, %v, want an orderly end", b, err)
	}
}
