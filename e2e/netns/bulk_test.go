package netns

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"
)

const bulkSize = 50 << 20

// pattern is a byte stream that does not repeat within a transfer.
type pattern struct {
	n    int64 // bytes left
	seed []byte
	at   int
}

func newPattern(n int64) *pattern { return &pattern{n: n, seed: blob(1<<16 + 13)} }

func (p *pattern) Read(b []byte) (int, error) {
	if p.n == 0 {
		return 0, io.EOF
	}
	n := copy(b[:min(int64(len(b)), p.n)], p.seed[p.at:])
	p.at = (p.at + n) % len(p.seed)
	p.n -= int64(n)
	return n, nil
}

func sumOf(n int64) string {
	h := sha256.New()
	io.Copy(h, newPattern(n))
	return sum(h)
}

func sum(h hash.Hash) string { return fmt.Sprintf("%x", h.Sum(nil)) }

// TestBulk: four downloads and four uploads of 50 MB at a time, beside a client that
// reads 1 kB and then stops until the others are done; the proxies' memory stays bounded.
func TestBulk(t *testing.T) {
	ctx := within(t, 2*time.Minute)
	want := sumOf(bulkSize)
	path := w.app.at(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == "POST" {
			h := sha256.New()
			io.Copy(h, r.Body)
			io.WriteString(w, sum(h))
			return
		}
		w.Header().Set("Content-Length", fmt.Sprint(bulkSize))
		io.Copy(w, newPattern(bulkSize))
	})
	rss := func() (sum [2]int64) {
		for i := range sum {
			var err error
			if sum[i], err = w.Proxy(i).RSS(); err != nil {
				t.Fatal(err)
			}
		}
		return sum
	}
	download := func(rt *http.Transport, pace func(io.Reader) io.Reader) error {
		req, err := http.NewRequestWithContext(ctx, "GET", "http://app"+path, nil)
		if err != nil {
			return err
		}
		res, err := rt.RoundTrip(req)
		if err != nil {
			return err
		}
		defer res.Body.Close()
		h := sha256.New()
		if n, err := io.Copy(h, pace(res.Body)); err != nil || sum(h) != want {
			return fmt.Errorf("%d bytes came, not the same: %w", n, err)
		}
		return nil
	}
	upload := func(rt *http.Transport) error {
		a, err := send(ctx, rt, "POST", "app", path, newPattern(bulkSize))
		if err == nil && a.body != want {
			err = fmt.Errorf("the application got other bytes: %d %s", a.StatusCode, a.body)
		}
		return err
	}
	asIs := func(r io.Reader) io.Reader { return r }
	before := rss()

	slow := make(chan error, 1)
	release := make(chan struct{})
	began := make(chan struct{})
	go func() {
		slow <- download(transport(t, true, w.Pod("web"), vip(appVIP, portH1)), func(r io.Reader) io.Reader {
			return &held{r: r, began: began, release: release}
		})
	}()
	recv(t, ctx, began, "the slow download's first bytes")

	start := time.Now()
	var all sync.WaitGroup
	for i := range 4 {
		port, h2 := []int{portH1, portH2}[i%2], i/2 == 1
		all.Go(func() {
			if err := download(transport(t, h2, w.Pod("web"), vip(appVIP, port)), asIs); err != nil {
				t.Errorf("download %d: %v", i, err)
			}
		})
		all.Go(func() {
			if err := upload(transport(t, h2, w.Pod("web2"), vip(appVIP, port))); err != nil {
				t.Errorf("upload %d: %v", i, err)
			}
		})
	}
	done := make(chan struct{})
	go func() { all.Wait(); close(done) }()
	peak := before
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for running := true; running; {
		select {
		case <-done:
			running = false
		case <-tick.C:
		}
		for i, b := range rss() {
			peak[i] = max(peak[i], b)
		}
	}
	t.Logf("8 x 50 MB took %v", time.Since(start).Round(time.Millisecond))
	const limit = int64(60 << 20)
	for i := range peak {
		t.Logf("proxy of node%d: %d MB before, %d MB at most", i+1, before[i]>>20, peak[i]>>20)
		if peak[i]-before[i] > limit {
			t.Errorf("the proxy of node%d grew by %d MB, at most %d are allowed", i+1, (peak[i]-before[i])>>20, limit>>20)
		}
	}
	close(release)
	if err := recv(t, ctx, slow, "the slow download's end"); err != nil {
		t.Errorf("slow download: %v", err)
	}
}

// held reads 1 kB, then nothing until it is released.
type held struct {
	r       io.Reader
	n       int
	began   chan struct{}
	release chan struct{}
}

func (h *held) Read(b []byte) (int, error) {
	if h.n < 1024 {
		n, err := h.r.Read(b[:min(len(b), 1024-h.n)])
		if h.n += n; h.n == 1024 {
			close(h.began)
		}
		return n, err
	}
	<-h.release
	return h.r.Read(b)
}

// pressed writes until a write has waited for two seconds, and says how much went.
func pressed(c net.Conn, most int64) (n int64, stopped bool, err error) {
	p := newPattern(most)
	buf := make([]byte, 64<<10)
	for {
		k, rerr := p.Read(buf)
		if rerr != nil {
			return n, false, nil
		}
		c.SetWriteDeadline(time.Now().Add(2 * time.Second))
		m, err := c.Write(buf[:k])
		n += int64(m)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			c.SetWriteDeadline(time.Time{})
			return n, true, nil
		}
		if err != nil {
			return n, false, err
		}
	}
}

// TestBackPressure: a reader that stops stops the writer at the other end of the
// mesh, after an amount that sockets and proxies hold; and all of it is there later.
func TestBackPressure(t *testing.T) {
	const most = 256 << 20 // what an unbounded mesh would swallow
	const bound = 64 << 20
	check := func(t *testing.T, n int64, stopped bool, err error) {
		t.Helper()
		t.Logf("%d kB were taken", n>>10)
		if err != nil || !stopped || n > bound {
			t.Errorf("the writer was stopped: %v after %d MB, %v; want it within %d MB", stopped, n>>20, err, bound>>20)
		}
	}
	same := func(t *testing.T, r io.Reader, n int64) {
		t.Helper()
		h := sha256.New()
		if got, err := io.CopyN(h, r, n); err != nil || sum(h) != sumOf(n) {
			t.Errorf("%d of %d bytes came, not the same: %v", got, n, err)
		}
	}
	t.Run("raw TCP to the client", func(t *testing.T) {
		t.Parallel()
		ctx := within(t, time.Minute)
		c := dial(t, ctx, w.Pod("web"), vip(appVIP, portQueue))
		a := queues[0].accept(t, ctx)
		n, stopped, err := pressed(a, most)
		check(t, n, stopped, err)
		same(t, c, n)
	})
	t.Run("raw TCP to the application", func(t *testing.T) {
		t.Parallel()
		ctx := within(t, time.Minute)
		c := dial(t, ctx, w.Pod("web"), vip(appVIP, portQueue+1))
		a := queues[1].accept(t, ctx)
		n, stopped, err := pressed(c, most)
		check(t, n, stopped, err)
		same(t, a, n)
	})
	t.Run("HTTP answer", func(t *testing.T) {
		t.Parallel()
		ctx := within(t, time.Minute)
		wrote, read := make(chan func(), 1), make(chan struct{})
		var n int64
		path := w.raw.at(t, func(q rawRequest) {
			fmt.Fprintf(q.c, "HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", int64(most))
			var stopped bool
			var err error
			n, stopped, err = pressed(q.c, most)
			wrote <- func() { check(t, n, stopped, err) }
			select { // an answer that is cut may lose what is on its way
			case <-read:
			case <-ctx.Done():
			}
			q.c.Close()
		})
		c := dialH1(t, ctx, portRaw)
		c.send("GET %s HTTP/1.1\r\nHost: app\r\n\r\n", path)
		recv(t, ctx, wrote, "the writer's stop")()
		if _, err := readHead(c.r); err != nil {
			t.Fatal(err)
		}
		same(t, c.r, n)
		close(read)
	})
	t.Run("HTTP request", func(t *testing.T) {
		t.Parallel()
		ctx := within(t, time.Minute)
		size, result := make(chan int64, 1), make(chan string, 1)
		path := w.raw.at(t, func(q rawRequest) {
			n := recv(t, ctx, size, "the writer's stop")
			h := sha256.New()
			io.CopyN(h, q.r, n)
			result <- sum(h)
			q.c.Close()
		})
		c := dialH1(t, ctx, portRaw)
		c.send("POST %s HTTP/1.1\r\nHost: app\r\nContent-Length: %d\r\n\r\n", path, int64(most))
		n, stopped, err := pressed(c, most)
		check(t, n, stopped, err)
		size <- n
		if got := recv(t, ctx, result, "the rest"); got != sumOf(n) {
			t.Error("the application read other bytes")
		}
	})
}
