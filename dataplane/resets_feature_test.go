package dataplane_test

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// TestTimeoutsBesideALongRequest: 3,200 requests that their rule's limit of time ends are
// no attack of the source's on the destination: a request beside them on the same session is not cut.
func TestTimeoutsBesideALongRequest(t *testing.T) {
	end := make(chan struct{})
	began := make(chan struct{}, 1)
	app := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/slow") {
			<-r.Context().Done()
			return
		}
		began <- struct{}{}
		b, err := io.ReadAll(r.Body)
		<-end
		fmt.Fprint(w, string(b), err)
	}))
	defer app.Close()
	var port int
	fmt.Sscanf(app.URL, "http://127.0.0.1:%d", &port)

	w := newTown(t)
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(fmt.Sprintf("service shop/cart 127.0.0.2\npods shop/cart %[1]d ip=127.1.0.1\nlocal shop/web cid=web\nlocal shop/cart %[1]d cid=cart1\nroute shop/cart cart\nrule match=prefix:/slow timeout=30ms\nrule match=prefix:/long timeout=1h\n", port))
	host := fmt.Sprintf("cart.shop.aether.internal:%d", port)
	long := make(chan string, 1)
	body, feed := io.Pipe()
	go func() {
		st, text, _, err := ask(t.Context(), at, "POST", host, "/long", body)
		long <- fmt.Sprint(st, " ", text, " ", err)
	}()
	io.WriteString(feed, "half")
	<-began
	var wg sync.WaitGroup
	var mu sync.Mutex
	seen := map[string]int{}
	for range 64 {
		wg.Go(func() {
			c := dialAt(t, at)
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			br := bufio.NewReader(c)
			for range 50 {
				how := "an end"
				fmt.Fprintf(c, "POST /slow HTTP/1.1\r\nHost: %s\r\nContent-Length: 0\r\n\r\n", host)
				if res, err := http.ReadResponse(br, nil); err == nil {
					_, _ = io.Copy(io.Discard, res.Body)
					how = res.Status[:3]
				}
				mu.Lock()
				seen[how]++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if seen["504"] != 3200 {
		t.Errorf("%v, want 3,200 of 504", seen)
	}
	io.WriteString(feed, " and half")
	feed.Close()
	close(end)
	if got := <-long; got != "200 half and half<nil> <nil>" {
		t.Errorf("the long request: %s", got)
	}
}

func dialAt(t *testing.T, addr string) net.Conn {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		t.Error(err)
		runtime.Goexit()
	}
	return c
}
