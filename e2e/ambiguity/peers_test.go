package ambiguity

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"

	"aether/e2e/mesh"
	"aether/e2e/rig"
)

// The configurations are the shortest that make each a reverse proxy for HTTP/1.1: what
// is not said is as it comes.
const (
	envoyConf = `
static_resources:
  listeners:
  - name: in
    address: { socket_address: { address: 127.0.0.1, port_value: %d } }
    filter_chains:
    - filters:
      - name: hcm
        typed_config:
          "@type": type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager
          stat_prefix: in
          route_config: { virtual_hosts: [ { name: all, domains: [ "*" ], routes: [ { match: { prefix: "/" }, route: { cluster: app } } ] } ] }
          http_filters: [ { name: router, typed_config: { "@type": type.googleapis.com/envoy.extensions.filters.http.router.v3.Router } } ]
  clusters:
  - name: app
    type: STATIC
    load_assignment: { cluster_name: app, endpoints: [ { lb_endpoints: [ { endpoint: { address: { socket_address: { address: 127.0.0.1, port_value: %d } } } } ] } ] }
`
	haproxyConf = `
defaults
  mode http
  timeout connect 5s
  timeout client 1m
  timeout server 1m
frontend in
  bind 127.0.0.1:%d
  default_backend app
backend app
  server app 127.0.0.1:%d
`
	nginxConf = `
user root;
worker_processes 1;
daemon off;
pid %[1]s/nginx.pid;
error_log stderr crit;
events { worker_connections 256; }
http {
  access_log off;
  client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi;
  uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi;
  server {
    listen 127.0.0.1:%[2]d;
    location / { proxy_pass http://127.0.0.1:%[3]d; proxy_http_version 1.1; proxy_set_header Host %[4]s; proxy_set_header Connection ""; }
  }
}
`
	// nodeApp writes a line of JSON for each request, and answers it then: standard
	// output is a file, so the line is there before the answer.
	nodeApp = `
require("http").createServer((q, s) => {
  const body = [];
  q.on("data", (b) => body.push(b));
  q.on("end", () => {
    console.log(JSON.stringify({ method: q.method, host: q.headers.host, target: Buffer.from(q.url, "latin1").toString("base64"), body: Buffer.concat(body).toString("base64") }));
    s.end();
  });
}).listen(%d, "127.0.0.1");
`
)

// peer is a way to an application: who speaks to it, where, and what the application
// behind it understood.
type peer struct {
	name    string
	version string // of a proxy that is not ours
	dial    func(context.Context) (net.Conn, error)
	port    string          // that requests ask for
	take    func() []string // what was understood since the last call
}

// lab is a mesh of two of our proxies, and the other proxies beside it, each before an
// application of its own.
type lab struct {
	*mesh.Mesh
	ours, captured *peer   // the proxy port, and a captured dial to the service's address; a recorder behind
	others         []*peer // other proxies, a recorder behind each
	backs          []*peer // other back ends, behind our proxies
}

// serviceIP is the number of the Service's address.
const serviceIP = 30

func (l *lab) up(ctx context.Context) error {
	if err := rig.Need("nginx", "haproxy", "node"); err != nil {
		return err
	}
	envoy, err := rig.Envoy(ctx)
	if err != nil {
		return err
	}
	web, err := l.AddPod(ctx, mesh.Pod{Name: "web"})
	if err != nil {
		return err
	}
	app, err := l.AddPod(ctx, mesh.Pod{Name: "app", Node: 1, Ports: "8083,8084,8085,8086"})
	if err != nil {
		return err
	}
	if err := l.Service(rig.ServiceManifest{Name: "app", ClusterIPs: l.ClusterIPs(serviceIP), Ports: []uint16{8083, 8084, 8085, 8086}}); err != nil {
		return err
	}
	from := func(p *rig.Pod, addr string) func(context.Context) (net.Conn, error) {
		return func(ctx context.Context) (net.Conn, error) { return p.Dial(ctx, "tcp", addr) }
	}

	raw := &recorder{}
	if err := l.ServeTCP(ctx, &app.Space, "127.0.0.1:8083", raw.serve); err != nil {
		return err
	}
	l.ours = &peer{"aether", "", from(web, "127.0.0.1:18081"), "8083", raw.take}
	l.captured = &peer{"aether, captured", "", from(web, fmt.Sprintf("%s:8083", l.ClusterIPs(serviceIP)[0])), "8083", raw.take}

	// Behind our proxies: nginx, seen by what it sends on, net/http, and Node.
	behind := &recorder{}
	if err := l.ServeTCP(ctx, &app.Space, "127.0.0.1:7001", behind.serve); err != nil {
		return err
	}
	if err := l.nginx(ctx, &app.Space, 8084, 7001, "$http_host"); err != nil {
		return err
	}
	std := &recorder{}
	if err := l.netHTTP(ctx, &app.Space, "127.0.0.1:8085", std); err != nil {
		return err
	}
	js, err := l.node(ctx, &app.Space, 8086)
	if err != nil {
		return err
	}
	for _, b := range []struct {
		name, port string
		take       func() []string
	}{{"nginx", "8084", behind.take}, {"net/http", "8085", std.take}, {"Node", "8086", js.take}} {
		l.backs = append(l.backs, &peer{b.name, "", from(web, "127.0.0.1:18081"), b.port, b.take})
	}

	// The other proxies, in a namespace that no proxy captures.
	bare, err := l.Rig.AddPod(ctx, 0, "bare")
	if err != nil {
		return err
	}
	// It has the Services' addresses, too, and nothing listens on them: what is passed through to one ends at once.
	const services = "10.96.0.0/24"
	for _, c := range []struct {
		in   *rig.Space
		args []string
	}{
		{&l.Rig.Nodes[0].Space, []string{"ip", "route", "add", services, "via", bare.IP4.String()}},
		{&bare.Space, []string{"ip", "route", "add", "local", services, "dev", "lo"}},
	} {
		if out, err := c.in.Command(ctx, c.args...).CombinedOutput(); err != nil {
			return fmt.Errorf("%s in %s: %w: %s", strings.Join(c.args, " "), c.in.NSName(), err, out)
		}
	}
	for i, o := range []struct {
		name, version string
		start         func(in, out int) error
	}{
		{"Envoy", rig.EnvoyVersion, func(in, out int) error {
			return l.run(ctx, &bare.Space, "envoy.yaml", fmt.Sprintf(envoyConf, in, out), in, envoy, "--concurrency", "1", "--disable-hot-restart", "-l", "error", "-c")
		}},
		{"HAProxy", version(ctx, "haproxy", "-v"), func(in, out int) error {
			return l.run(ctx, &bare.Space, "haproxy.cfg", fmt.Sprintf(haproxyConf, in, out), in, "haproxy", "-db", "-f")
		}},
		{"nginx", version(ctx, "nginx", "-v"), func(in, out int) error { return l.nginx(ctx, &bare.Space, in, out, "$host") }},
	} {
		r := &recorder{}
		in, out := 8001+i, 9001+i
		if err := l.ServeTCP(ctx, &bare.Space, fmt.Sprintf("127.0.0.1:%d", out), r.serve); err != nil {
			return err
		}
		if err := o.start(in, out); err != nil {
			return err
		}
		l.others = append(l.others, &peer{o.name, o.version, from(bare, fmt.Sprintf("127.0.0.1:%d", in)), "8083", r.take})
	}
	return l.Start(ctx)
}

var versionForm = regexp.MustCompile(`\d+\.\d+\.\d+`)

// version of a command, as it says itself.
func version(ctx context.Context, args ...string) string {
	out, err := exec.CommandContext(ctx, args[0], args[1:]...).CombinedOutput()
	if v := versionForm.Find(out); err == nil && v != nil {
		return string(v)
	}
	return fmt.Sprintf("of unknown version (%v)", err)
}

// netHTTP serves h by net/http, which asks it about OPTIONS * too.
func (l *lab) netHTTP(ctx context.Context, in *rig.Space, addr string, h http.Handler) error {
	ln, err := in.Listen(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: h, DisableGeneralOptionsHandler: true, ErrorLog: log.New(io.Discard, "", 0)}
	done := make(chan struct{})
	go func() {
		defer close(done)
		srv.Serve(ln) // always an error: the one of Close
	}()
	l.OnClose(func() {
		srv.Close()
		<-done
	})
	return nil
}

// run starts a server with the configuration as its last argument, and waits for its port.
func (l *lab) run(ctx context.Context, in *rig.Space, file, conf string, port int, args ...string) error {
	_, err := l.start(ctx, in, file, conf, port, args...)
	return err
}

func (l *lab) start(ctx context.Context, in *rig.Space, file, conf string, port int, args ...string) (*rig.Proc, error) {
	path := filepath.Join(l.Rig.Dir, in.Name+"-"+file)
	if err := os.WriteFile(path, []byte(conf), 0o644); err != nil {
		return nil, err
	}
	p, err := l.Rig.StartProcess(in, in.Name+"-"+file, append(args, path)...)
	if err != nil {
		return nil, err
	}
	return p, p.Ready(ctx, func(ctx context.Context) error {
		c, err := in.Dial(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err == nil {
			c.Close()
		}
		return err
	})
}

// nginx passes requests on to a port; host is the variable that names them there.
func (l *lab) nginx(ctx context.Context, in *rig.Space, port, to int, host string) error {
	dir := filepath.Join(l.Rig.Dir, fmt.Sprintf("nginx-%s-%d", in.Name, port))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return l.run(ctx, in, "nginx.conf", fmt.Sprintf(nginxConf, dir, port, to, host), port, "nginx", "-p", dir, "-e", "stderr", "-c")
}

// lines are those of a file that is written to, from where the last reader stopped.
type lines struct {
	path string
	mu   sync.Mutex
	at   int64
}

func (l *lab) node(ctx context.Context, in *rig.Space, port int) (*lines, error) {
	p, err := l.start(ctx, in, "app.js", fmt.Sprintf(nodeApp, port), port, "node")
	if err != nil {
		return nil, err
	}
	return &lines{path: p.Log}, nil
}

func (l *lines) take() (seen []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f, err := os.Open(l.path)
	if err != nil {
		return []string{err.Error()}
	}
	defer f.Close()
	if _, err := f.Seek(l.at, io.SeekStart); err != nil {
		return []string{err.Error()}
	}
	for r := bufio.NewReader(f); ; {
		b, err := r.ReadBytes('\n')
		if err != nil {
			return seen
		}
		l.at += int64(len(b))
		var q struct {
			Method, Host string
			Target, Body []byte
		}
		if err := json.Unmarshal(bytes.TrimSpace(b), &q); err != nil {
			seen = append(seen, strings.TrimSpace(string(b)))
			continue
		}
		seen = append(seen, canonical(q.Method, q.Host, string(q.Target), q.Body))
	}
}

var errLeft = errors.New("ambiguity: a request was recorded that no test sent")
