package peer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"aether/e2e/rig"
)

// client is an HTTP client in a pod; it dials addr whatever the URL says.
type client struct {
	*http.Client
	w *world
	t *http.Transport
}

func (w *world) client(p *rig.Pod, addr string, h2c bool) *client {
	t := &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return p.Dial(ctx, "tcp", addr) },
		Protocols:   new(http.Protocols), DisableCompression: true, ExpectContinueTimeout: time.Minute,
	}
	t.Protocols.SetHTTP1(!h2c)
	t.Protocols.SetUnencryptedHTTP2(h2c)
	w.Cleanup(t.CloseIdleConnections)
	return &client{&http.Client{Transport: t, Timeout: 40 * time.Second}, w, t}
}

// do sends a request to that host and returns the answer, its body a checksum if long.
func (c *client) do(method, host, target string, body io.Reader, header ...string) (*http.Response, string, error) {
	req, err := http.NewRequestWithContext(c.w.ctx, method, "http://"+host+target, body)
	if err != nil {
		return nil, "", err
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Add(header[i], header[i+1])
	}
	res, err := c.Do(req)
	if err != nil {
		return nil, "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return res, "", fmt.Errorf("%s, then: %w", res.Status, err)
	}
	if len(b) > 64<<10 {
		s, err := sum(bytes.NewReader(b))
		return res, s, err
	}
	return res, string(b), nil
}

// get is do for a request without body that must be answered 200.
func (c *client) get(host, target string, header ...string) (*http.Response, string, error) {
	res, body, err := c.do("GET", host, target, nil, header...)
	if err == nil && res.StatusCode != 200 {
		err = fmt.Errorf("GET %s%s: %s: %s", host, target, res.Status, body)
	}
	return res, body, err
}

// large moves bodies of 20 MB up, down and both ways at once, and compares checksums.
func (c *client) large(t *testing.T, host string) {
	t.Helper()
	for _, tt := range []struct {
		name, method, target string
		body                 func() io.Reader
		length               int64
	}{
		{"up with a length", "POST", "/sum", func() io.Reader { return noise(size) }, size},
		{"up without", "PUT", "/sum", func() io.Reader { return noise(size) }, -1},
		{"down with a length", "GET", fmt.Sprintf("/bytes?n=%d", size), nil, 0},
		{"down without", "GET", fmt.Sprintf("/bytes?n=%d&chunked=1", size), nil, 0},
		{"both ways at once", "POST", "/echo", func() io.Reader { return noise(size) }, -1},
	} {
		var body io.Reader
		if tt.body != nil {
			body = tt.body()
		}
		req, err := http.NewRequestWithContext(c.w.ctx, tt.method, "http://"+host+tt.target, body)
		must(t, err)
		req.ContentLength = tt.length
		res, err := c.Do(req)
		if err != nil {
			t.Errorf("%s: %v", tt.name, err)
			continue
		}
		var got string
		if tt.target == "/sum" {
			b, e := io.ReadAll(res.Body)
			got, err = string(b), e
		} else {
			got, err = sum(res.Body)
		}
		res.Body.Close()
		if err != nil || res.StatusCode != 200 || got != largeSum() {
			t.Errorf("%s: %s, %s, want %s (%v)", tt.name, res.Status, got, largeSum(), err)
		}
	}
}

// headers asks what the application sees.
func (c *client) headers(t *testing.T, host string, header ...string) (seen http.Header, res *http.Response) {
	t.Helper()
	res, body, err := c.get(host, "/headers", header...)
	must(t, err)
	if err := json.Unmarshal([]byte(body), &seen); err != nil {
		t.Fatalf("%v: %s", err, body)
	}
	return seen, res
}

// caller checks that the application saw that account as the caller, and no other.
func (c *client) caller(t *testing.T, host, account, by string) {
	t.Helper()
	seen, _ := c.headers(t, host, "X-Forwarded-Client-Cert", "URI="+spiffe("forged"))
	got := seen["X-Forwarded-Client-Cert"]
	if len(got) != 1 || strings.Contains(got[0], "forged") || strings.Contains(got[0], ",") ||
		!strings.HasPrefix(got[0], "By="+spiffe(by)+";Hash=") || !strings.HasSuffix(got[0], ";URI="+spiffe(account)) {
		t.Errorf("x-forwarded-client-cert: %q, want one element By=%s;Hash=...;URI=%s", got, spiffe(by), spiffe(account))
	}
}

// echoTCP sends n bytes of noise, ends the sending side, and wants the same bytes and the end back.
func (w *world) echoTCP(t *testing.T, p *rig.Pod, addr string, n int64) {
	t.Helper()
	c, err := p.Dial(w.ctx, "tcp", addr)
	must(t, err)
	defer c.Close()
	c.SetDeadline(time.Now().Add(40 * time.Second))
	sent := make(chan error, 1)
	go func() {
		_, err := io.Copy(c, noise(n))
		if err == nil {
			err = c.(*net.TCPConn).CloseWrite()
		}
		sent <- err
	}()
	got, err := sum(c)
	if err != nil || got != noiseSum(n) {
		t.Errorf("echo of %d bytes from %s: got %s, want %s (%v)", n, addr, got, noiseSum(n), err)
	}
	c.Close()
	if err := <-sent; err != nil && err != io.EOF {
		t.Errorf("echo of %d bytes from %s: send: %v", n, addr, err)
	}
}

// refusedTCP dials and sends a line, and wants nothing back: an end or a reset, soon.
func (w *world) refusedTCP(t *testing.T, p *rig.Pod, addr string) {
	t.Helper()
	c, err := p.Dial(w.ctx, "tcp", addr)
	must(t, err)
	defer c.Close()
	c.SetDeadline(time.Now().Add(10 * time.Second))
	io.WriteString(c, "hello?\n") // may fail: the refusal may be there first
	b := make([]byte, 100)
	n, err := c.Read(b)
	var timeout net.Error
	if n > 0 || err == nil {
		t.Errorf("%s answered %q (%v), want a refusal", addr, b[:n], err)
	} else if errors.As(err, &timeout) && timeout.Timeout() {
		t.Errorf("%s neither answered nor refused: %v", addr, err)
	}
}
