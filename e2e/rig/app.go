package rig

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// AppBody is what the nginx application answers to "GET /".
const AppBody = "ok app\n"

// StartNginx runs nginx in the pod, one worker, plain HTTP/1.1 on every port (IPv4 and IPv6).
// "/" answers AppBody, "/1k" and "/64k" that many bytes (the second from a file).
// It returns when "/" answers.
func (r *Rig) StartNginx(ctx context.Context, p *Pod, ports ...uint16) (*Proc, error) {
	if err := Need("nginx"); err != nil {
		return nil, err
	}
	if len(ports) == 0 {
		return nil, fmt.Errorf("rig: nginx in %s: no port given", p.Name)
	}
	dir := filepath.Join(r.Dir, p.Name+"-nginx")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("rig: nginx in %s: %w", p.Name, err)
	}
	for name, data := range map[string]string{
		"64k":        strings.Repeat("x", 64<<10),
		"nginx.conf": nginxConf(dir, ports),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(data), 0o644); err != nil {
			return nil, fmt.Errorf("rig: nginx in %s: %w", p.Name, err)
		}
	}
	proc, err := r.StartProcess(&p.Space, p.Name+"-nginx", "nginx", "-p", dir, "-e", "stderr", "-c", filepath.Join(dir, "nginx.conf"))
	if err != nil {
		return nil, err
	}
	client := p.HTTPClient()
	defer client.CloseIdleConnections()
	err = proc.Ready(ctx, func(ctx context.Context) error {
		return Get200(ctx, client, "http://127.0.0.1:"+strconv.Itoa(int(ports[0]))+"/", "")
	})
	if err != nil {
		proc.Stop() // the first error says more
		return nil, err
	}
	return proc, nil
}

// nginxConf: connections live as long as their clients want, and every file that
// nginx writes is in dir.
func nginxConf(dir string, ports []uint16) string {
	var listen strings.Builder
	for _, p := range ports {
		fmt.Fprintf(&listen, "    listen %d backlog=4096; listen [::]:%d backlog=4096;\n", p, p)
	}
	return fmt.Sprintf(`user root;
worker_processes 1;
daemon off;
pid %[1]s/nginx.pid;
error_log stderr warn;
events { worker_connections 8192; }
http {
  access_log off; keepalive_requests 1000000000; keepalive_timeout 3600s; client_max_body_size 0;
  client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi;
  uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi;
  default_type text/plain;
  server {
%[2]s    root %[1]s;
    location = / { return 200 "%[3]s"; }
    location = /1k { return 200 "%[4]s"; }
    location = /64k { }
    location / { return 404 "no such file\n"; }
  }
}
`, dir, listen.String(), strings.ReplaceAll(AppBody, "\n", `\n`), strings.Repeat("x", 1024))
}

// HTTPClient is a client whose connections leave from the namespace. URLs name
// literal IP addresses. Redirects are not followed and no proxy is used.
func (s *Space) HTTPClient() *http.Client {
	return &http.Client{
		Transport: &http.Transport{
			DialContext:        s.Dial,
			DisableCompression: true,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// ServeHTTP serves h on the address in the namespace, in this process: for applications
// whose processor time is nobody's concern. stop closes every connection and
// returns when the server has ended; call it before the rig's Close.
func (s *Space) ServeHTTP(ctx context.Context, addr string, h http.Handler) (stop func(), err error) {
	l, err := s.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	srv := &http.Server{Handler: h}
	done := make(chan struct{})
	go func() {
		defer close(done)
		srv.Serve(l) // always an error: the one of Close
	}()
	return func() {
		srv.Close()
		<-done
	}, nil
}

// Get200 fetches the URL, with that Host if it is not empty, and returns an error
// unless the answer is 200. It is meant as a condition of Until.
func Get200(ctx context.Context, c *http.Client, url, host string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Host = host
	resp, err := c.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		body := make([]byte, 300)
		n, _ := resp.Body.Read(body)
		return fmt.Errorf("%s (host %s): %s: %s", url, host, resp.Status, body[:n])
	}
	return nil
}
