package peer

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"aether/e2e/rig"
)

// nginx starts nginx in the space on addr, with files: /large (noise, 20 MB), /small ("small
// file\n"), and /limited, where a body of more than 1 kB is answered 413 before it is read.
func (w *world) nginx(in *rig.Space, addr string) {
	w.Helper()
	must(w, rig.Need("nginx"))
	dir := filepath.Join(w.rig.Dir, in.Name+"-nginx")
	must(w, os.MkdirAll(filepath.Join(dir, "www"), 0o755))
	large, err := os.Create(filepath.Join(dir, "www", "large"))
	must(w, err)
	_, err = io.Copy(large, noise(size))
	must(w, err)
	must(w, large.Close())
	must(w, os.WriteFile(filepath.Join(dir, "www", "small"), []byte("small file\n"), 0o644))
	conf := filepath.Join(dir, "nginx.conf")
	must(w, os.WriteFile(conf, fmt.Appendf(nil, `user root;
worker_processes 1;
daemon off;
pid %[1]s/nginx.pid;
error_log stderr warn;
events { worker_connections 1024; }
http {
  access_log %[1]s/access.log;
  client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi;
  uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi;
  default_type application/octet-stream;
  server {
    listen %[2]s;
    root %[1]s/www;
    location /limited { client_max_body_size 1k; proxy_pass http://127.0.0.1:1; }
    location = /seen { add_header X-Seen "$request_method $host $server_protocol" always; return 204; }
  }
}
`, dir, addr), 0o644))
	p, err := w.rig.StartProcess(in, in.Name+"-nginx", "nginx", "-p", dir, "-e", "stderr", "-c", conf)
	must(w, err)
	c := in.HTTPClient()
	defer c.CloseIdleConnections()
	must(w, p.Ready(w.ctx, func(ctx context.Context) error { return rig.Get200(ctx, c, "http://"+addr+"/small", "") }))
}

// files fetches what nginx serves; host is a name for it.
func (c *client) files(t *testing.T, host string) {
	t.Helper()
	res, got, err := c.get(host, "/large")
	if err != nil || got != largeSum() || res.ContentLength != size {
		t.Errorf("/large: %s, want %s (%v)", got, largeSum(), err)
		return
	}
	modified, tag := res.Header.Get("Last-Modified"), res.Header.Get("Etag")
	for _, tt := range []struct {
		method, target string
		header         []string
		status         int
		length         int64
		want           string
	}{
		{"GET", "/small", nil, 200, 11, "small file\n"},
		{"HEAD", "/large", nil, 200, size, ""},
		{"GET", "/large", []string{"If-Modified-Since", modified}, 304, -1, ""},
		{"GET", "/large", []string{"If-None-Match", tag}, 304, -1, ""},
		{"GET", "/small", []string{"Range", "bytes=2-4"}, 206, 3, "all"},
		{"GET", "/small", []string{"Range", "bytes=-5"}, 206, 5, "file\n"},
		{"GET", "/small", []string{"Range", "bytes=100-"}, 416, -1, "<html>"},
		{"GET", "/none", nil, 404, -1, "<html>"},
		{"GET", "/seen", nil, 204, 0, ""},
	} {
		res, got, err := c.do(tt.method, host, tt.target, nil, tt.header...)
		if err != nil || res.StatusCode != tt.status || !strings.HasPrefix(got, tt.want) || tt.length > 0 && res.ContentLength != tt.length {
			t.Errorf("%s %s %q: %+v %q (%v), want %d with %q", tt.method, tt.target, tt.header, res, got, err, tt.status, tt.want)
		}
	}
}

// early uploads to where the answer is 413 before the body is read, again and again. The
// answer must get through, and what comes after it too.
func (c *client) early(t *testing.T, host string) {
	t.Helper()
	for i := range 20 {
		var body io.Reader = noise(size)
		if i%2 == 1 {
			body = io.MultiReader(body) // hides nothing, but has no length
		}
		req, err := http.NewRequestWithContext(c.w.ctx, "POST", "http://"+host+"/limited", body)
		must(t, err)
		if i%2 == 0 {
			req.ContentLength = size
		}
		res, err := c.Do(req)
		if err != nil {
			t.Errorf("upload %d: %v", i, err)
			continue
		}
		b, err := io.ReadAll(res.Body)
		res.Body.Close()
		if err != nil || res.StatusCode != 413 || !strings.Contains(string(b), "413 Request Entity Too Large") {
			t.Errorf("upload %d: %s %q (%v), want nginx's 413", i, res.Status, b, err)
		}
		if _, got, err := c.get(host, "/small"); err != nil || got != "small file\n" {
			t.Errorf("after upload %d: %q, %v", i, got, err)
		}
	}
}

// nginx as application behind two of our proxies, and as a server outside the mesh.
func TestNginx(t *testing.T) {
	w := newWorld(t)
	b := w.pod(1, "b", rig.PodManifest{Ports: "8080"})
	w.service("b", service, 8080)
	w.nginx(&b.Space, "127.0.0.1:8080")
	outside := fmt.Sprintf("%s:8088", w.rig.Nodes[1].IP4)
	w.nginx(&w.rig.Nodes[1].Space, outside)
	w.proxy(1)
	p := w.proxy(0)
	name := host("b", 8080)

	for _, v := range []struct {
		name string
		h2c  bool
	}{{"HTTP1", false}, {"h2c", true}} {
		t.Run("application "+v.name, func(t *testing.T) {
			c := w.client(w.a, "10.96.0.10:8080", v.h2c)
			c.files(t, name)
			c.early(t, name)
			res, _, err := c.do("GET", name, "/seen", nil)
			must(t, err)
			if got, want := res.Header.Get("X-Seen"), "GET b.demo.aether.internal HTTP/1.1"; got != want {
				t.Errorf("nginx saw %q, want %q", got, want)
			}
		})
	}
	t.Run("passed through", func(t *testing.T) {
		c := w.client(w.a, outside, false)
		c.files(t, "files.example")
		for _, target := range []string{"/small", "/large"} { // pipelined, answered in order
			conn, err := w.a.Dial(w.ctx, "tcp", outside)
			must(t, err)
			_, err = io.WriteString(conn, strings.Repeat("GET "+target+" HTTP/1.1\r\nHost: files.example\r\n\r\n", 3))
			must(t, err)
			r := bufio.NewReader(conn)
			for i := range 3 {
				res, err := http.ReadResponse(r, nil)
				must(t, err)
				got, err := sum(res.Body)
				want := largeSum()
				if target == "/small" {
					want, _ = sum(strings.NewReader("small file\n"))
				}
				if err != nil || res.StatusCode != 200 || got != want {
					t.Errorf("pipelined %s %d: %s %s (%v)", target, i, res.Status, got, err)
				}
			}
			conn.Close()
		}
		// Spliced, not parsed: a request line that is no HTTP gets nginx's own answer.
		conn, err := w.a.Dial(w.ctx, "tcp", outside)
		must(t, err)
		defer conn.Close()
		_, err = io.WriteString(conn, "NONSENSE\r\n\r\n")
		must(t, err)
		got, err := io.ReadAll(conn)
		if err != nil || !strings.Contains(string(got), "400 Bad Request") || !strings.Contains(string(got), "nginx") {
			t.Errorf("nonsense: %q, %v, want nginx's 400", got, err)
		}
		if why := p.why(5); !strings.Contains(why, "passthrough") {
			t.Errorf("not passed through:\n%s", why)
		}
	})
	t.Run("passed through, early answer", func(t *testing.T) {
		w.client(w.a, outside, false).early(t, "files.example")
	})
	t.Run("curl sees the same as without us", func(t *testing.T) {
		// The node is outside the mesh and captured by nobody.
		args := []string{"curl", "-sS", "-D", "-", "-o", "/dev/null", "--max-time", "20", "-r", "5-10,0-2", "http://" + outside + "/small"}
		with, _, _ := w.run(&w.a.Space, nil, args...)
		without, _, _ := w.run(&w.rig.Nodes[0].Space, nil, args...)
		names := func(s string) (n []string) {
			for l := range strings.Lines(s) {
				k, _, _ := strings.Cut(strings.TrimSpace(l), ":")
				n = append(n, k)
			}
			return n
		}
		if !slices.Equal(names(with), names(without)) || !strings.Contains(with, "206") {
			t.Errorf("through the proxy:\n%s\nwithout:\n%s", with, without)
		}
	})
}
