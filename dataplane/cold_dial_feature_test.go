package dataplane_test

import (
	"bufio"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"
)

// dial is a captured connection to shop/cart's address at a port, ended with the test.
func (w *coldTown) dial(port int) net.Conn {
	w.t.Helper()
	at := w.dialled[port]
	if at == "" {
		at = w.listen(w.web.Engine, fmt.Sprintf("127.0.0.2:%d", port), w.out.AcceptCaptured(w.web))
		w.dialled[port] = at
	}
	c, err := net.Dial("tcp", at)
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c
}

// says is the mesh in which shop/cart's Service has ports and its rows, if any, others.
func (w *coldTown) says(service, rows string) string {
	text := "catalog shop/cart\nservice shop/cart 127.0.0.2 " + service + "\nlocal shop/web cid=web\nlocal shop/cart HTTP=http,TCP=tcp cid=cart1\n"
	if rows != "" {
		text += "pods shop/cart " + rows + " ip=127.1.0.1\n"
	}
	return strings.NewReplacer("HTTP", fmt.Sprint(w.http), "TCP", fmt.Sprint(w.tcp)).Replace(text)
}

// TestColdDial: a captured connection to a service whose rows are not here is decided by its rows alone, whatever
// its Service says of the port by then: as if they had been here all the time (contract 4.6, decision 033).
func TestColdDial(t *testing.T) {
	for _, tt := range []struct{ name, service, rows string }{
		{"raw TCP", "TCP=tcp", "TCP=tcp"},
		{"raw TCP that the Service still calls HTTP", "TCP=http", "TCP=tcp"},
		{"raw TCP that the Service does not have yet", "8080=http", "TCP=tcp"},
		{"raw TCP of a Service that says nothing", "", "TCP=tcp"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newColdTown(t)
			w.news(w.says(tt.service, ""))
			c := w.dial(w.tcp) // and says nothing: the server is to speak first
			w.wants()
			w.news(w.says(tt.service, tt.rows))
			began := time.Now()
			if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != "cart\n" {
				t.Errorf("%q, %v", line, err)
			}
			if took := time.Since(began); took > 950*time.Millisecond { // 1 s is what looking at the first bytes takes
				t.Errorf("the server was heard after %s", took)
			}
			w.ended(1, 0, 0, 0)
		})
	}
	for _, tt := range []struct {
		name, service, rows, host string
		code                      int
	}{
		{"HTTP", "HTTP=http", "HTTP=http", "cart", 200},
		{"HTTP that the Service still calls TCP", "HTTP=tcp", "HTTP=http", "cart", 200},
		{"HTTP that the Service does not have yet", "1=tcp", "HTTP=http", "cart", 200},
		{"HTTP that the rows do not have any more", "HTTP=http", "1=tcp", "cart", 421},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newColdTown(t)
			w.news(w.says(tt.service, ""))
			c := w.dial(w.http)
			fmt.Fprintf(c, "GET /x HTTP/1.1\r\nHost: %s\r\n\r\n", tt.host)
			w.wants()
			w.news(w.says(tt.service, tt.rows))
			if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || !strings.HasPrefix(line, fmt.Sprintf("HTTP/1.1 %d ", tt.code)) {
				t.Errorf("%q, %v", line, err)
			}
			w.ended(1, 0, 0, 0) // the request did not have to wait again
		})
	}
}

// TestColdDialExpires: where no rows come in 2 s, what a Service says of its ports decides (contract 4.6): HTTP is
// answered in HTTP, and is not waited for once more; raw TCP is reset.
func TestColdDialExpires(t *testing.T) {
	w := newColdTown(t)
	w.news(w.says("HTTP=http,TCP=tcp", ""))
	began := time.Now()
	c, raw := w.dial(w.http), w.dial(w.tcp)
	fmt.Fprint(c, "GET /x HTTP/1.1\r\nHost: cart\r\n\r\n")
	b, err := bufio.NewReader(c).ReadString('\n')
	took := time.Since(began)
	if err != nil || !strings.HasPrefix(b, "HTTP/1.1 503 ") {
		t.Errorf("%q, %v", b, err)
	}
	if took < 2*time.Second || took >= 4*time.Second {
		t.Errorf("answered after %s, want after 2 s and not after twice that", took)
	}
	if n, err := raw.Read(make([]byte, 1)); err == nil || n > 0 || !strings.Contains(err.Error(), "reset") {
		t.Errorf("raw TCP: %d, %v", n, err)
	}
	w.ended(0, 2, 0, 0)
}

// TestColdDialOverflow: of one pod that is alone with them 2,048 of 4,096 wait (decision 055), connections and requests together; HTTP that finds no place is told so
// in HTTP, and raw TCP is reset.
func TestColdDialOverflow(t *testing.T) {
	w := newColdTown(t)
	w.news(w.says("HTTP=http,TCP=tcp", ""))
	overflows := func() uint64 { return w.out.Cold[3].Value() }
	for end := time.Now().Add(time.Minute); ; {
		for w.out.Waiting() < 2048 {
			w.dial(w.tcp)
			w.wants()
		}
		before := overflows()
		reset := func() error { // perhaps before the connect is over
			raw, err := net.Dial("tcp", w.captured)
			if err != nil {
				return err
			}
			defer raw.Close()
			_ = raw.SetDeadline(time.Now().Add(20 * time.Second))
			_, err = raw.Read(make([]byte, 1))
			return err
		}()
		c := w.dial(w.http)
		fmt.Fprint(c, "GET /x HTTP/1.1\r\nHost: cart\r\nConnection: close\r\n\r\n")
		b, err := bufio.NewReader(c).ReadString('\n')
		if err != nil || !strings.HasPrefix(b, "HTTP/1.1 503 ") {
			t.Fatalf("%q, %v", b, err)
		}
		if reset == nil || !strings.Contains(reset.Error(), "reset") {
			t.Fatalf("raw TCP: %v", reset)
		}
		switch overflows() - before {
		case 2:
			return
		case 0, 1: // it took so long that some had waited their 2 s, and there was room
		default:
			t.Fatalf("%d found no place, want both", overflows()-before)
		}
		if time.Now().After(end) {
			t.Fatal("2,048 never wait at once")
		}
		for len(w.wanted) > 0 {
			<-w.wanted
		}
	}
}

// TestColdMirror: what only gets copies of requests comes into scope by them; the copies themselves do not wait.
func TestColdMirror(t *testing.T) {
	w := newColdTown(t)
	app := w.echo()
	w.pod("shop1", "shop", "shop", "127.1.0.2")
	mesh := fmt.Sprintf("%sservice shop/shop 127.0.0.3 %d=http\npods shop/shop %[2]d=http ip=127.1.0.2\nlocal shop/shop %[2]d=http cid=shop1\nroute shop/shop shop:%[2]d\nrule mirror=cart:%d\n", w.cold, app, w.http)
	w.news(mesh)
	if a := <-w.request(t.Context(), "GET", fmt.Sprintf("shop.shop.aether.internal:%d", app), ""); a.err != nil || a.code != 200 {
		t.Errorf("%+v", a)
	}
	w.wants()
	w.ended(0, 0, 0, 0)
}
