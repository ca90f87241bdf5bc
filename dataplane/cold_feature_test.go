package dataplane_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"aether/dataplane/engine"
	"aether/dataplane/inbound"
	"aether/dataplane/model"
	"aether/dataplane/outbound"
)

// coldTown is a town in which shop/cart is in the catalog, and what is wanted is told.
type coldTown struct {
	*town
	web        *outbound.Pod
	wanted     chan model.ServiceName
	proxy      string         // web's proxy port
	http, tcp  int            // where the application is
	cold, warm string         // the mesh before, and after
	captured   string         // a dial of shop/cart's raw-TCP port
	dialled    map[int]string // and of its others, by port
}

func newColdTown(t *testing.T) *coldTown {
	w := &coldTown{wanted: make(chan model.ServiceName, 4096)}
	w.town = newTown(t, func(o *outbound.Config, _ *inbound.Config) {
		o.Want = func(n model.ServiceName) { w.wanted <- n }
	})
	w.web = w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	w.http, w.tcp = w.echo(), w.line("cart")
	w.proxy = w.listen(w.web.Engine, "127.0.0.1:0", w.out.AcceptProxy(w.web))
	w.dialled = map[int]string{}
	w.captured = w.listen(w.web.Engine, fmt.Sprintf("127.0.0.2:%d", w.tcp), w.out.AcceptCaptured(w.web))
	w.dialled[w.tcp] = w.captured
	w.cold = fmt.Sprintf("catalog shop/cart\nservice shop/cart 127.0.0.2 %d=http,%d=tcp\nlocal shop/web cid=web\nlocal shop/cart %[1]d=http,%[2]d=tcp cid=cart1\n", w.http, w.tcp)
	w.warm = w.cold + fmt.Sprintf("pods shop/cart %d=http,%d=tcp ip=127.1.0.1\n", w.http, w.tcp)
	w.news(w.cold)
	return w
}

// news makes text the mesh, as Node.Apply does.
func (w *coldTown) news(text string) {
	w.t.Helper()
	w.apply(text)
	w.out.RetryWaiting()
}

func (w *coldTown) host() string { return fmt.Sprintf("cart.shop.aether.internal:%d", w.http) }

// wants waits until somebody asks for shop/cart.
func (w *coldTown) wants() {
	w.t.Helper()
	select {
	case n := <-w.wanted:
		if n != (model.ServiceName{Namespace: "shop", Name: "cart"}) {
			w.t.Fatalf("%s is asked for", n)
		}
	case <-time.After(20 * time.Second):
		w.t.Fatal("nobody asks for shop/cart")
	}
}

// ended checks how waits ended up to now: came, expired, gone, overflow.
func (w *coldTown) ended(want ...uint64) {
	w.t.Helper()
	late := time.After(20 * time.Second)
	for {
		var got []uint64
		for i := range w.out.Cold {
			got = append(got, w.out.Cold[i].Value())
		}
		if fmt.Sprint(got) == fmt.Sprint(want) && w.out.Waiting() == 0 {
			return
		}
		select {
		case <-time.After(time.Millisecond):
		case <-late:
			w.t.Fatalf("waits ended %v, want %v of %v; %d wait", got, want, outbound.ColdResults, w.out.Waiting())
		}
	}
}

type answered struct {
	code int
	text string
	err  error
	took time.Duration
}

func (w *coldTown) request(ctx context.Context, method, host, body string) <-chan answered {
	done := make(chan answered, 1)
	go func() {
		began := time.Now()
		code, text, _, err := ask(ctx, w.proxy, method, host, "/x", strings.NewReader(body))
		done <- answered{code, text, err, time.Since(began)}
	}()
	return done
}

// TestCold: a request for a service whose rows are not here waits for them, its body with it (contract 4.6).
func TestCold(t *testing.T) {
	w := newColdTown(t)
	body := strings.Repeat("0123456789abcdef", 20<<10) // more than anything on the way keeps
	done := w.request(t.Context(), "POST", w.host(), body)
	w.wants()
	w.news(w.cold + "service shop/other 127.0.0.7 80=http\n") // a world that says nothing new of it
	select {
	case a := <-done:
		t.Fatalf("answered before its rows are here: %+v", a)
	default:
	}
	w.news(w.warm)
	if a := <-done; a.err != nil || a.code != 200 || !strings.Contains(a.text, fmt.Sprintf("body=%d %x", len(body), sum([]byte(body)))) {
		t.Errorf("%+v", a)
	}
	w.ended(1, 0, 0, 0)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	parts, _ := engine.Ask(ctx, w.engine, w.out.Used)
	used := 0
	for _, list := range parts {
		for _, n := range list {
			if n.String() != "shop/cart" {
				t.Errorf("%s is used", n)
			}
			used++
		}
	}
	if used == 0 {
		t.Error("shop/cart is not used")
	}
}

// TestColdExpires: 2 s without rows, and the answer is 503; a name that nobody has is answered at once (contract 4.6).
func TestColdExpires(t *testing.T) {
	w := newColdTown(t)
	began := time.Now()
	if a := <-w.request(t.Context(), "GET", fmt.Sprintf("none.shop.aether.internal:%d", w.http), ""); a.code != 404 {
		t.Errorf("a name that nobody has: %+v", a)
	}
	if a := <-w.request(t.Context(), "GET", "cart.shop.aether.internal:1", ""); a.code != 421 {
		t.Errorf("a port that the Service does not have: %+v", a)
	}
	if took := time.Since(began); took > time.Second {
		t.Errorf("they took %s", took)
	}
	if len(w.wanted) > 0 {
		t.Errorf("%s is asked for", <-w.wanted)
	}
	a := <-w.request(t.Context(), "GET", w.host(), "")
	if a.err != nil || a.code != 503 || a.took < 2*time.Second || a.took > 10*time.Second || !strings.Contains(a.text, "shop/cart") {
		t.Errorf("%+v", a)
	}
	w.ended(0, 1, 0, 0)
	for e := range w.journal.ch {
		if e.Status == 503 {
			if e.Cause != "await-rows" || e.Flags.String() != "NC" {
				t.Errorf("recorded as %s", e.String())
			}
			break
		}
	}
}

// TestColdNoMore: what waits is decided by what the next world says, whatever that is.
func TestColdNoMore(t *testing.T) {
	for _, tt := range []struct {
		name, after string
		code        int
	}{
		{"nobody has rows of it", "service shop/cart 127.0.0.2 HTTP=http,TCP=tcp\nlocal shop/web cid=web\n", 503},
		{"the name is gone", "local shop/web cid=web\n", 404},
		{"its port is another class", "catalog shop/cart\nservice shop/cart 127.0.0.2 HTTP=tcp\nlocal shop/web cid=web\n", 421},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newColdTown(t)
			done := w.request(t.Context(), "GET", w.host(), "")
			w.wants()
			w.news(strings.NewReplacer("HTTP", fmt.Sprint(w.http), "TCP", fmt.Sprint(w.tcp)).Replace(tt.after))
			if a := <-done; a.err != nil || a.code != tt.code || a.took > 1900*time.Millisecond {
				t.Errorf("%+v, want %d at once", a, tt.code)
			}
			w.ended(1, 0, 0, 0)
		})
	}
}

// TestColdClientLeaves: nobody waits for whom has gone.
func TestColdClientLeaves(t *testing.T) {
	w := newColdTown(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := w.request(ctx, "GET", w.host(), "")
	w.wants()
	cancel()
	<-done
	w.ended(0, 0, 1, 0)
	w.news(w.warm)
	if a := <-w.request(t.Context(), "GET", w.host(), ""); a.code != 200 {
		t.Errorf("%+v", a)
	}
}

// TestColdRaw: a connection to a declared raw-TCP port waits as well, unread, and is reset when nothing comes.
func TestColdRaw(t *testing.T) {
	w := newColdTown(t)
	dial := func() net.Conn {
		t.Helper()
		c, err := net.Dial("tcp", w.captured)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		return c
	}
	began := time.Now()
	c := dial()
	w.wants()
	if _, err := c.Read(make([]byte, 1)); err == nil || err == io.EOF || time.Since(began) < 2*time.Second {
		t.Errorf("after %s: %v, want a reset after 2 s", time.Since(began), err)
	}
	w.ended(0, 1, 0, 0)

	c = dial()
	w.wants()
	_ = c.(*net.TCPConn).SetLinger(0)
	c.Close()
	w.ended(0, 1, 1, 0)

	c = dial()
	fmt.Fprint(c, "hello")
	w.wants()
	w.news(w.warm)
	if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != "cart\n" {
		t.Errorf("%q, %v", line, err)
	}
	w.ended(1, 1, 1, 0)

	w.news(w.cold)
	dial()
	w.wants()
	w.news(w.cold + fmt.Sprintf("pods shop/cart %d=http ip=127.1.0.1\n", w.http)) // no port of it any more
	w.ended(2, 1, 1, 0)                                                           // it is looked at now
}

// TestColdUnknown: a name that the catalog does not have waits for nothing and asks for nothing (contract 9.9); with
// -v it says how long that takes.
func TestColdUnknown(t *testing.T) {
	w := newColdTown(t)
	var took []time.Duration
	for range 200 {
		a := <-w.request(t.Context(), "GET", fmt.Sprintf("nobody.shop.aether.internal:%d", w.http), "")
		if a.err != nil || a.code != 404 {
			t.Fatalf("%d %q, %v", a.code, a.text, a.err)
		}
		took = append(took, a.took)
	}
	w.ended(0, 0, 0, 0)
	if len(w.wanted) != 0 {
		t.Errorf("%s is asked for", <-w.wanted)
	}
	slices.Sort(took)
	t.Logf("refused after %s in the middle, %s at p99", took[len(took)/2], took[len(took)*99/100])
}
