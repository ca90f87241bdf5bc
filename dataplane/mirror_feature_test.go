package dataplane_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"aether/dataplane/outbound"
)

// mirrorTown is two services, of which the second gets copies of what the first is asked.
func mirrorTown(t *testing.T, app, shadow *witness, rules string) (w *town, at string) {
	w = newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart1", "cart", "cart1", "127.1.0.1")
	w.pod("cart2", "cart", "cart2", "127.1.0.2")
	w.pod("new1", "new", "new1", "127.1.0.3")
	at = w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(strings.NewReplacer("PORT", fmt.Sprint(app.port), "SHADOW", fmt.Sprint(shadow.port)).Replace(`
service shop/cart 127.0.0.2
pods shop/cart PORT ip=127.1.0.1 id=spiffe://td/ns/shop/sa/cart1
pods shop/cart PORT ip=127.1.0.2 id=spiffe://td/ns/shop/sa/cart2
service shop/new 127.0.0.3
pods shop/new SHADOW,1 ip=127.1.0.3 id=spiffe://td/ns/shop/sa/new1
service shop/lost 127.0.0.4
pods shop/lost 8080 ip=127.1.0.77
local shop/web cid=web
local shop/cart PORT cid=cart1
local shop/cart PORT cid=cart2
local shop/new SHADOW,1 cid=new1
filter shop/ask authz
route shop/cart cart
` + rules))
	return w, at
}

// mirrored is how many mirrors have ended in a way.
func (w *town) mirrored(how string) uint64 {
	return w.out.Mirrored[slices.Index(outbound.MirrorResults[:], how)].Value()
}

// ends waits until n mirrors have ended.
func (w *town) ends(n uint64) {
	w.t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		var sum uint64
		for i := range w.out.Mirrored {
			sum += w.out.Mirrored[i].Value()
		}
		if sum == n {
			return
		}
		if sum > n {
			w.t.Fatalf("%d mirrors have ended, want %d", sum, n)
		}
		select {
		case <-w.journal.ch: // something has ended: the mirror's other end, perhaps
		case <-deadline:
			w.t.Fatalf("%d mirrors have ended, want %d", sum, n)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// TestMirror: the copy is what the application got, and what becomes of it changes nothing for the client
// (HTTPRequestMirrorFilter; case 166).
func TestMirror(t *testing.T) {
	var plan, shadowPlan sync.Map
	planned := func(plan *sync.Map) func(id string, n int) string {
		return func(id string, n int) string {
			p, ok := plan.Load(id)
			if !ok {
				return "200"
			}
			words := strings.Fields(p.(string))
			return words[min(n, len(words)-1)]
		}
	}
	app, shadow := newWitness(t, planned(&plan)), newWitness(t, planned(&shadowPlan))
	w, at := mirrorTown(t, app, shadow, `
rule match=prefix:/m mirror=new:SHADOW set=x-rule:m rewrite=prefix=/changed
rule match=prefix:/dead mirror=new:1
rule match=prefix:/lost mirror=lost:8080
rule match=prefix:/two mirror=new:SHADOW mirror=new:SHADOW
rule match=prefix:/none mirror=new:SHADOW*0/1
`)
	host := fmt.Sprintf("cart.shop.aether.internal:%d", app.port)
	var ended uint64
	for i, tt := range []struct {
		method, path  string
		body          int
		app, shadow   string // what they do
		status, seen  int    // by the application
		copies        int
		how           string // mirrors end
		chunked, gRPC bool
	}{
		{"GET", "/m/", 0, "200", "200", 200, 1, 1, "answered", false, false},
		{"HEAD", "/m/", 0, "200", "200", 200, 1, 1, "answered", false, false},
		{"POST", "/m/", 1, "200", "200", 200, 1, 1, "answered", false, false},
		{"POST", "/m/", 200_000, "200", "200", 200, 1, 1, "answered", false, false},
		{"POST", "/m/", 200_000, "200", "200", 200, 1, 1, "answered", true, false},
		{"POST", "/m/", 100, "200+grpc", "200", 200, 1, 1, "answered", false, true},
		{"POST", "/m/", 5000, "200", "500", 200, 1, 1, "answered", false, false},
		{"POST", "/m/", 5000, "200", "503", 200, 1, 1, "answered", false, false}, // not sent again
		{"POST", "/m/", 5000, "200", "rst", 200, 1, 1, "answered", false, false}, // by the mirror's own proxy: 503
		{"POST", "/m/", 5000, "200", "half+", 200, 1, 1, "failed", false, false},
		{"POST", "/m/", 5000, "200", "garbage", 200, 1, 1, "answered", false, false},
		{"POST", "/m/", 5000, "503 200", "200", 200, 2, 1, "answered", false, false}, // sent again, and mirrored once
		{"GET", "/m/", 0, "500", "200", 500, 1, 1, "answered", false, false},
		{"POST", "/dead/", 5000, "200", "", 200, 1, 0, "answered", false, false},
		{"POST", "/lost/", 5000, "200", "", 200, 1, 0, "failed", false, false},
		{"POST", "/two/", 5000, "200", "200", 200, 1, 2, "answered", false, false},
		{"POST", "/none/", 5000, "200", "200", 200, 1, 0, "", false, false},
	} {
		t.Run(fmt.Sprintf("%s %s %d %s %s", tt.method, tt.path, tt.body, tt.app, tt.shadow), func(t *testing.T) {
			id := fmt.Sprint("r", i)
			plan.Store(id, tt.app)
			shadowPlan.Store(id, tt.shadow)
			body := make([]byte, tt.body)
			for k := range body {
				body[k] = byte(k*7 + k>>8)
			}
			var in io.Reader
			if tt.body > 0 {
				in = bytes.NewReader(body)
				if tt.chunked {
					in = io.MultiReader(in)
				}
			}
			var fields []string
			if tt.gRPC {
				fields = []string{"Content-Type", "application/grpc"}
			}
			before := uint64(0)
			if tt.how != "" {
				before = w.mirrored(tt.how)
			}
			status, text, _, err := ask(t.Context(), at, tt.method, host, tt.path+id, in, fields...)
			if err != nil || status != tt.status {
				t.Fatalf("%d %q, %v", status, text, err)
			}
			if tt.path != "/none/" {
				n := uint64(max(1, tt.copies))
				ended += n
				w.ends(ended)
				if got := w.mirrored(tt.how) - before; got != n {
					t.Errorf("%d mirrors were %s, want %d", got, tt.how, n)
				}
			}
			sights, copies := app.saw(id), shadow.saw(id)
			if len(sights) != tt.seen || len(copies) != tt.copies {
				t.Fatalf("seen %d times, and %d times by the mirror's; want %d and %d", len(sights), len(copies), tt.seen, tt.copies)
			}
			for _, c := range copies {
				if tt.shadow != "rst" && (!bytes.Equal(c.body, body) || !c.whole || c.head != sights[0].head) {
					t.Errorf("the copy: %q with %d bytes, whole %v; want %q with %d", c.head, len(c.body), c.whole, sights[0].head, len(body))
				}
			}
		})
	}
}

// TestMirrorHangs: while mirrors do not answer and do not read, requests are answered, their number is bounded, and so is what
// is kept of each.
func TestMirrorHangs(t *testing.T) {
	const n = 300
	app := newWitness(t, func(string, int) string { return "200" })
	shadow := newWitness(t, func(string, int) string { return "hang" })
	w, at := mirrorTown(t, app, shadow, "rule match=prefix:/ mirror=new:SHADOW\n")
	host := fmt.Sprintf("cart.shop.aether.internal:%d", app.port)
	for i := range n {
		if status, text, _, err := ask(t.Context(), at, "GET", host, fmt.Sprint("/", i), nil); err != nil || status != 200 {
			t.Fatalf("%d: %d %q, %v", i, status, text, err)
		}
	}
	const most = 128 // of 256 a pod that is alone with them has half (decision 055)
	if got := w.mirrored("overflow"); got != n-most {
		t.Errorf("%d were not mirrored, want %d", got, n-most)
	}
}

// TestMirrorSlow: a mirror that takes no more is dropped once 64 KiB wait for it, and the original's upload goes on.
func TestMirrorSlow(t *testing.T) {
	app := newWitness(t, func(string, int) string { return "200" })
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error { // connections have what the listener has
		return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) })
	}}
	ln, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0") // nobody accepts, and nobody reads
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	w, at := mirrorTown(t, app, &witness{port: ln.Addr().(*net.TCPAddr).Port}, "rule match=prefix:/ mirror=new:SHADOW\n")
	body := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	status, text, _, err := ask(t.Context(), at, "POST", fmt.Sprintf("cart.shop.aether.internal:%d", app.port), "/big", bytes.NewReader(body))
	if err != nil || status != 200 {
		t.Fatalf("%d %q, %v", status, text, err)
	}
	if s := app.saw("big"); len(s) != 1 || !bytes.Equal(s[0].body, body) {
		t.Error("the application got something else")
	}
	if w.mirrored("slow") != 1 { // before the answer: it was dropped while the body came
		t.Error("not dropped")
	}
}

// TestMirrorIsCut: of a request that the client breaks off the mirror's end is told, too.
func TestMirrorIsCut(t *testing.T) {
	var seen atomic.Int64
	both := make(chan struct{})
	act := func(string, int) string {
		if seen.Add(1) == 2 {
			close(both)
		}
		return "200"
	}
	app, shadow := newWitness(t, act), newWitness(t, act)
	w, at := mirrorTown(t, app, shadow, "rule match=prefix:/ mirror=new:SHADOW\n")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	pr, pw := io.Pipe()
	defer pw.Close()
	go func() {
		_, _ = pw.Write([]byte("the first part"))
		<-both
		cancel()
		pw.CloseWithError(context.Canceled) // net/http waits for the body's reader
	}()
	if _, _, _, err := ask(ctx, at, "POST", fmt.Sprintf("cart.shop.aether.internal:%d", app.port), "/half", pr); err == nil {
		t.Error("answered")
	}
	w.ends(1)
	if w.mirrored("cut") != 1 {
		t.Error("not cut")
	}
}

// TestMirrorShare: one in five of 1,000 requests, within what chance allows (case 166): six standard deviations of the
// binomial distribution, 200 ± 76.
func TestMirrorShare(t *testing.T) {
	app := newWitness(t, func(string, int) string { return "200" })
	last := make(chan struct{})
	shadow := newWitness(t, func(id string, _ int) string {
		if id == "last" {
			close(last)
		}
		return "500"
	})
	w, at := mirrorTown(t, app, shadow, "rule match=prefix:/all mirror=new:SHADOW\nrule match=prefix:/ mirror=new:SHADOW*1/5\n")
	host := fmt.Sprintf("cart.shop.aether.internal:%d", app.port)
	for range 1000 {
		if status, _, _, err := ask(t.Context(), at, "GET", host, "/x", nil); err != nil || status != 200 {
			t.Fatalf("%d, %v", status, err)
		}
	}
	// One that is mirrored for certain goes the same way behind all others.
	if status, _, _, err := ask(t.Context(), at, "GET", host, "/all/last", nil); err != nil || status != 200 {
		t.Fatalf("%d, %v", status, err)
	}
	<-last
	w.ends(uint64(len(shadow.saw("x")) + 1))
	if n := w.mirrored("answered") - 1; n < 124 || n > 276 {
		t.Errorf("%d of 1000 were mirrored, want about 200", n)
	}
}
