package dataplane_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"aether/dataplane/engine"
	"aether/e2e/testseed"
)

var (
	cuts = flag.Int("cuts", testseed.Count(1000, 2000), "requests that TestCuts sends, each cut somewhere")
)

// draw makes the numbers of one thing of one request: the same in each run of a seed.
func draw(seed uint64, of ...int) *rand.Rand {
	h := seed
	for _, n := range of {
		h = (h ^ uint64(n) + 0x9e3779b97f4a7c15) * 0xbf58476d1ce4e5b9
		h ^= h >> 31
	}
	return rand.New(rand.NewPCG(seed, h))
}

// frail is a connection to an inbound listener, seen through a wire that breaks
// with a reset after some bytes, either way.
func (w *town) frail(to *net.TCPConn, up, down int64, broken *atomic.Int64) *net.TCPConn {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Error(err)
		return to
	}
	defer ln.Close()
	a, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		w.t.Error(err)
		return to
	}
	b, err := ln.Accept()
	if err != nil {
		w.t.Error(err)
		a.Close()
		return to
	}
	var breaks sync.Once // both ways may come to their ends
	pipe := func(dst, src *net.TCPConn, n int64) {
		_, err := io.CopyN(dst, src, n)
		if err == nil {
			breaks.Do(func() { broken.Add(1) })
		}
		_ = dst.SetLinger(0)
		_ = src.SetLinger(0)
		dst.Close()
		src.Close()
	}
	go pipe(to, b.(*net.TCPConn), up) // ends with either end, and these with the test
	go pipe(b.(*net.TCPConn), to, down)
	return a.(*net.TCPConn)
}

// shaky is a pod to whose application now and then no connection can be made.
type shaky struct {
	here
	n    *atomic.Int64
	seed uint64
}

func (s shaky) fails() bool { return draw(s.seed, 7, int(s.n.Add(1))).IntN(12) == 0 }

func (s shaky) Get(v6 bool) (int, bool) {
	return -1, false
}

func (s shaky) Request(v6 bool, on func(int, error)) {
	if s.fails() {
		go on(-1, errors.New("no socket"))
		return
	}
	s.here.Request(v6, on)
}

// TestCuts: connections break at thousands of random points: those of the hop, and
// those to applications before, in and after the head, the body and the answer. An application never
// sees a request twice unless contract 5.7 allows it: a method that is not idempotent only
// after an application has said 503. No body is ever another's or has a hole, and every request is answered.
func TestCuts(t *testing.T) {
	seed := testseed.Seed(t)
	idempotent := map[string]bool{"GET": true, "HEAD": true, "OPTIONS": true, "TRACE": true, "PUT": true, "DELETE": true}
	type request struct {
		method  string
		body    []byte
		chunked bool
	}
	plan := func(i int) request {
		r := draw(seed, 1, i)
		q := request{method: []string{"GET", "HEAD", "OPTIONS", "PUT", "DELETE", "POST", "POST", "POST", "PATCH", "REPORT"}[r.IntN(10)]}
		if q.method == "GET" || q.method == "HEAD" || r.IntN(4) == 0 {
			return q
		}
		q.body = make([]byte, []int{1 + r.IntN(100), 1 + r.IntN(5000), 1 + r.IntN(64<<10), 1 + r.IntN(200<<10)}[r.IntN(4)])
		for k := range q.body {
			q.body[k] = byte(i + k*7 + k>>9)
		}
		q.chunked = r.IntN(2) == 0
		return q
	}
	app := newWitness(t, func(id string, n int) string {
		i, err := strconv.Atoi(id)
		if err != nil {
			return "400"
		}
		r := draw(seed, 2, i, n)
		at := r.IntN(len(plan(i).body)*3/2 + 2)
		switch r.IntN(16) {
		case 0:
			return "cut"
		case 1:
			return "rst"
		case 2, 3:
			return fmt.Sprint("cut:", at)
		case 4, 5:
			return fmt.Sprint("rst:", at)
		case 6:
			return "half"
		case 7:
			return "half+"
		case 8:
			return "early"
		case 9:
			return "500"
		case 10, 11, 12:
			return "503"
		}
		return "200"
	})
	w := newTown(t)
	var broken, wires, sockets atomic.Int64
	w.sockets = func(string) engine.Sockets { return shaky{n: &sockets, seed: seed} }
	w.wire = func(c *net.TCPConn) *net.TCPConn {
		r := draw(seed, 3, int(wires.Add(1)))
		most := []int64{6_000, 60_000, 600_000}[r.IntN(3)]
		return w.frail(c, 1+r.Int64N(most), 1+r.Int64N(most), &broken)
	}
	web := w.pod("web", "web", "web", "127.1.0.9")
	var text strings.Builder
	text.WriteString("service shop/cart 127.0.0.2\nlocal shop/web cid=web\n")
	for i := 1; i <= 3; i++ {
		w.pod(fmt.Sprint("cart", i), "cart", fmt.Sprint("cart", i), fmt.Sprint("127.1.0.", i))
		fmt.Fprintf(&text, "pods shop/cart %d ip=127.1.0.%d id=spiffe://td/ns/shop/sa/cart%d\nlocal shop/cart %d cid=cart%d\n", app.port, i, i, app.port, i)
	}
	w.apply(text.String())
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	host := fmt.Sprintf("cart.shop.aether.internal:%d", app.port)

	var next, twice, twiceUnsafe, good, failed, cut atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for !t.Failed() {
				i := int(next.Add(1)) - 1
				if i >= *cuts {
					return
				}
				q := plan(i)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				status, text, err := once(ctx, at, host, i, q.method, q.body, q.chunked)
				cancel()
				sights := app.saw(strconv.Itoa(i))
				bad := func(format string, args ...any) {
					var did []string
					for _, s := range sights {
						did = append(did, fmt.Sprintf("%s at %q with %d bytes (whole %v)", s.did, s.pod, len(s.body), s.whole))
					}
					t.Errorf("request %d, %s with %d bytes: %d %q %v; seen as %v: %s", i, q.method, len(q.body), status, text, err, did, fmt.Sprintf(format, args...))
				}
				last := ""
				for k, s := range sights {
					if !bytes.HasPrefix(q.body, s.body) || s.whole && len(s.body) != len(q.body) {
						bad("sight %d is not the body that was sent", k)
					}
					if last = s.did; k == len(sights)-1 {
						break
					}
					if s.did != "503" && !idempotent[q.method] {
						bad("sent again after %q", s.did)
					}
				}
				// Each attempt of the source's may find kept connections of the destination's dead, twice.
				if most := map[bool]int{false: 3, true: 9}[idempotent[q.method]]; len(sights) > most {
					bad("seen more than %d times", most)
				}
				if q.method == "HEAD" && last == "half+" { // all there is of an answer to HEAD
					last = "200"
				}
				switch {
				case status == 0: // broken off before the client had its head, or it saw its own write fail
					switch what, _, _ := strings.Cut(last, ":"); what {
					case "", "cut", "rst", "half":
						bad("no answer")
					}
					cut.Add(1)
				case err != nil:
					cut.Add(1)
				case status == 200 && q.method != "HEAD" && text != "answer to "+strconv.Itoa(i) && text != "early":
					bad("another's answer")
				case status == 200 && last != "200" && last != "early", status == 500 && last != "500":
					bad("no application said so")
				case status == 200:
					good.Add(1)
				default:
					failed.Add(1)
				}
				if len(sights) > 1 {
					twice.Add(1)
					if !idempotent[q.method] {
						twiceUnsafe.Add(1)
					}
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d requests: %d answered 200, %d otherwise, %d answers broke off; %d seen more than once, %d of them not idempotent; %d of %d hops broke",
		min(next.Load(), int64(*cuts)), good.Load(), failed.Load(), cut.Load(), twice.Load(), twiceUnsafe.Load(), broken.Load(), wires.Load())
	if n := int64(*cuts); !t.Failed() && n >= 1000 && (twice.Load() < n/10 || twiceUnsafe.Load() < n/50 || good.Load() < n/4 || failed.Load() < n/20 || broken.Load() < n/50 && !inProcess) {
		t.Error("too little of what this test is about has happened")
	}
}

// once sends request i. status is 0 if there was no answer; err tells that it broke off.
func once(ctx context.Context, addr, host string, i int, method string, body []byte, chunked bool) (status int, text string, err error) {
	tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	}}
	var in io.Reader
	switch {
	case chunked:
		in = io.MultiReader(bytes.NewReader(body)) // hides its length
	case len(body) > 0:
		in = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, fmt.Sprintf("http://%s/%d", host, i), in)
	if err != nil {
		return 0, "", err
	}
	res, err := tr.RoundTrip(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return res.StatusCode, string(b), err
}
