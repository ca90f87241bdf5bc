package dataplane_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// TestSessionPersistence: a real client with a real cookie comes back to its pod, over new connections, until that
// pod takes no more requests (GEP-1619).
func TestSessionPersistence(t *testing.T) {
	app := newWitness(t, func(id string, n int) string {
		if id == "fails" && n == 0 {
			return "503"
		}
		return "200"
	})
	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	for i := 1; i <= 3; i++ {
		w.pod(fmt.Sprint("cart", i), "cart", fmt.Sprint("cart", i), fmt.Sprint("127.1.0.", i))
	}
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	apply := func(unhealthy string) {
		mesh := "service shop/cart 127.0.0.2\nlocal shop/web cid=web\nroute shop/cart cart\nrule name=cookie match=prefix:/c sticky=sid\nrule name=field match=prefix:/h sticky=x-sid;header\n"
		for i := 1; i <= 3; i++ {
			health := "healthy"
			if fmt.Sprint("cart", i) == unhealthy {
				health = "draining"
			}
			mesh += fmt.Sprintf("pods shop/cart %[2]d ip=127.1.0.%[1]d pod=cart-%[1]d id=spiffe://td/ns/shop/sa/cart%[1]d health=%[3]s\nlocal shop/cart %[2]d cid=cart%[1]d\n", i, app.port, health)
		}
		w.apply(mesh)
	}
	apply("")
	host := fmt.Sprintf("cart.shop.aether.internal:%d", app.port)
	n := 0
	visit := func(path string, fields ...string) (pod string, h http.Header) {
		t.Helper()
		n++
		id := fmt.Sprint(n)
		status, text, h, err := ask(t.Context(), at, "GET", host, path+id, nil, fields...)
		s := app.saw(id)
		if err != nil || status != 200 || len(s) != 1 {
			t.Fatalf("%s: %d %q, %v, seen %d times", path, status, text, err, len(s))
		}
		return s[0].pod, h
	}
	for _, path := range []string{"/c/", "/h/"} {
		pod, h := visit(path)
		given := []string{"X-Sid", h.Get("X-Sid")}
		if path == "/c/" {
			pair, rest, _ := strings.Cut(h.Get("Set-Cookie"), ";")
			if rest != " Path=/c; HttpOnly" {
				t.Errorf("given %q", h.Get("Set-Cookie"))
			}
			given = []string{"Cookie", "theme=dark; " + pair}
		}
		for range 20 {
			got, h := visit(path, given...)
			if got != pod || h.Get("Set-Cookie") != "" {
				t.Fatalf("%s: at %s, want %s; given %q", path, got, pod, h.Get("Set-Cookie"))
			}
		}
		apply(pod)
		got, h := visit(path, given...)
		if got == pod || h.Get("Set-Cookie")+h.Get("X-Sid") == "" {
			t.Errorf("%s: at %s, which drains, given %q", path, got, h)
		}
		apply("")
	}
	// Another host has answered in the end: the session is there.
	_, h := visit("/c/")
	pair, _, _ := strings.Cut(h.Get("Set-Cookie"), ";")
	status, _, h, err := ask(t.Context(), at, "GET", host, "/c/fails", nil, "Cookie", pair)
	s := app.saw("fails")
	if err != nil || status != 200 || len(s) != 2 || s[0].pod == s[1].pod {
		t.Fatalf("%d, %v, seen %v", status, err, s)
	}
	pair, _, _ = strings.Cut(h.Get("Set-Cookie"), ";")
	if pod, _ := visit("/c/", "Cookie", pair); pod != s[1].pod {
		t.Errorf("at %s, want %s, which has answered", pod, s[1].pod)
	}
}
