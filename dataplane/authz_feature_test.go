//lint:file-ignore SA1019 services say append by the deprecated field, and mean it

package dataplane_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"aether/dataplane/extauthz"
	"aether/dataplane/inbound"
	"aether/dataplane/journal"
	"aether/dataplane/model"
	"aether/dataplane/outbound"
)

// judge is an authorization service: the real thing but for its judgement.
type judge struct {
	authv3.UnimplementedAuthorizationServer
	judge func(ctx context.Context, q *authv3.AttributeContext) (*authv3.CheckResponse, error)

	mu    sync.Mutex
	asked []*authv3.AttributeContext
}

func (j *judge) Check(ctx context.Context, r *authv3.CheckRequest) (*authv3.CheckResponse, error) {
	j.mu.Lock()
	j.asked = append(j.asked, r.Attributes)
	j.mu.Unlock()
	return j.judge(ctx, r.Attributes)
}

// of are the questions whose path begins with prefix.
func (j *judge) of(prefix string) (out []*authv3.AttributeContext) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, q := range j.asked {
		if strings.HasPrefix(q.Request.Http.Path, prefix) {
			out = append(out, q)
		}
	}
	return out
}

// serve serves j on a socket in dir and says where.
func (j *judge) serve(t *testing.T, dir string) (target string) {
	t.Helper()
	path := filepath.Join(dir, "authz.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	authv3.RegisterAuthorizationServer(s, j)
	var wg sync.WaitGroup
	wg.Go(func() { _ = s.Serve(ln) })
	t.Cleanup(func() { s.Stop(); wg.Wait() })
	return "unix://" + path
}

// asking makes both sides of a town ask at target.
func asking(t *testing.T, target string, limit time.Duration) (*extauthz.Service, func(*outbound.Config, *inbound.Config)) {
	t.Helper()
	s, err := extauthz.New(extauthz.Config{Target: target, Timeout: limit})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s, func(o *outbound.Config, i *inbound.Config) { o.Authz, i.Authz = s, s }
}

func ok() *rpcstatus.Status { return &rpcstatus.Status{Code: int32(codes.OK)} }

func header(name, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{Header: &corev3.HeaderValue{Key: name, Value: value}}
}

func also(name, value string) *corev3.HeaderValueOption {
	return &corev3.HeaderValueOption{Header: &corev3.HeaderValue{Key: name, Value: value}, Append: wrapperspb.Bool(true)}
}

func denial(code typev3.StatusCode, body string, headers ...*corev3.HeaderValueOption) *authv3.CheckResponse {
	return &authv3.CheckResponse{Status: &rpcstatus.Status{Code: int32(codes.PermissionDenied)}, HttpResponse: &authv3.CheckResponse_DeniedResponse{
		DeniedResponse: &authv3.DeniedHttpResponse{Status: &typev3.HttpStatus{Code: code}, Body: body, Headers: headers},
	}}
}

// echo answers with what it was sent.
func (w *town) echo() (port int) {
	w.t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		w.t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(rw http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		rw.Header().Set("X-App", "yes")
		rw.Header().Set("X-Both", "app")
		fmt.Fprintf(rw, "%s %s body=%d %x x-who=%s x-add=%q x-gone=%q expect=%q xfcc=%v", r.Method, r.RequestURI, len(b), sum(b),
			r.Header.Get("X-Who"), r.Header.Values("X-Add"), r.Header.Get("X-Gone"), r.Header.Get("Expect"), strings.Contains(r.Header.Get("X-Forwarded-Client-Cert"), "spiffe://td/ns/shop/sa/web"))
	})}
	var wg sync.WaitGroup
	wg.Go(func() { _ = srv.Serve(ln) })
	w.t.Cleanup(func() { srv.Close(); wg.Wait() })
	return ln.Addr().(*net.TCPAddr).Port
}

func sum(b []byte) (n uint32) {
	for _, c := range b {
		n = n*31 + uint32(c)
	}
	return n
}

// TestAuthz: what an authorization service says is what becomes of requests, at both ends of a hop (contract 10.7).
func TestAuthz(t *testing.T) {
	j := &judge{}
	j.judge = func(_ context.Context, q *authv3.AttributeContext) (*authv3.CheckResponse, error) {
		h := q.Request.Http
		_, what, _ := strings.Cut(strings.TrimPrefix(h.Path, "/"), "/")
		what, _, _ = strings.Cut(what, "?")
		what, _, _ = strings.Cut(what, "/")
		switch what {
		case "empty": // Envoy: no status is OK
			return &authv3.CheckResponse{}, nil
		case "deny":
			return denial(0, ""), nil
		case "bare":
			return &authv3.CheckResponse{Status: &rpcstatus.Status{Code: int32(codes.Unauthenticated)}}, nil
		case "teapot":
			return denial(418, "short and stout", header("Location", "/login"), header("X-Aether-Outcome", "503;-;GET;via_upstream"), header("Content-Type", "text/tea"),
				also("Set-Cookie", "a=1"), also("Set-Cookie", "b=2")), nil
		case "shared": // who may read it is the rule's to say
			return denial(403, "", also("Access-Control-Allow-Origin", "https://b.example"), header("Access-Control-Allow-Credentials", "true")), nil
		case "login":
			return denial(401, "who are you?"), nil
		case "edit":
			return &authv3.CheckResponse{Status: ok(), HttpResponse: &authv3.CheckResponse_OkResponse{OkResponse: &authv3.OkHttpResponse{
				Headers: []*corev3.HeaderValueOption{
					header("X-Who", "alice"), also("x-add", "2"), header(":path", "/other"), header("host", "other"), header("x-aether-pod", "nobody"),
					header("x-forwarded-client-cert", "By=me"), header("content-length", "7"),
				},
				HeadersToRemove:         []string{"x-gone", "x-forwarded-client-cert", "Host"},
				ResponseHeadersToAdd:    []*corev3.HeaderValueOption{header("X-App", "judge"), also("X-Both", "judge"), header("x-aether-outcome", "0;-;GET;overload")},
				QueryParametersToSet:    []*corev3.QueryParameter{{Key: "q", Value: "a b"}},
				QueryParametersToRemove: []string{"gone"},
			}}}, nil
		case "broken":
			return &authv3.CheckResponse{Status: ok(), HttpResponse: &authv3.CheckResponse_OkResponse{OkResponse: &authv3.OkHttpResponse{
				Headers: []*corev3.HeaderValueOption{header("X-Who", "a\r\nx-evil: 1")}}}}, nil
		case "many":
			r := &authv3.OkHttpResponse{}
			for i := range 200 {
				r.Headers = append(r.Headers, header(fmt.Sprint("x-", i), "1"))
			}
			return &authv3.CheckResponse{Status: ok(), HttpResponse: &authv3.CheckResponse_OkResponse{OkResponse: r}}, nil
		case "big":
			return denial(403, strings.Repeat("x", 100<<10)), nil
		case "error":
			return &authv3.CheckResponse{Status: ok(), HttpResponse: &authv3.CheckResponse_ErrorResponse{ErrorResponse: &authv3.DeniedHttpResponse{}}}, nil
		case "rpc":
			return nil, status.Error(codes.Internal, "down for repair")
		case "second":
			if q.ContextExtensions["team"] == "two" {
				if h.Headers["x-who"] != "one" {
					return denial(500, "the second filter does not see what the first changed"), nil
				}
				return denial(403, "the second says no"), nil
			}
			return &authv3.CheckResponse{Status: ok(), HttpResponse: &authv3.CheckResponse_OkResponse{OkResponse: &authv3.OkHttpResponse{Headers: []*corev3.HeaderValueOption{header("x-who", "one")}}}}, nil
		case "spelled": // one of the two spellings, always the plain one
			return denial(403, "not there"), nil
		}
		return &authv3.CheckResponse{Status: ok()}, nil
	}
	service, with := asking(t, j.serve(t, t.TempDir()), time.Minute)
	w := newTown(t, with)
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	w.pod("ask1", "ask", "ask", "127.1.0.4")
	w.pod("two1", "two", "two", "127.1.0.5")
	port := w.echo()
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(strings.ReplaceAll(`
service shop/cart 127.0.0.2
pods shop/cart PORT ip=127.1.0.1
service shop/ask 127.0.0.3
pods shop/ask PORT ip=127.1.0.4
service shop/two 127.0.0.4
pods shop/two PORT ip=127.1.0.5
local shop/two PORT cid=two1
local shop/web cid=web pod=web-1
local shop/cart PORT cid=cart1
local shop/ask PORT cid=ask1
filter shop/one authz ctx=team:one
filter shop/a authz ctx=team:one scope=chain target=two
filter shop/b authz ctx=team:two scope=chain target=two
filter shop/blind authz nobody
filter shop/in scope=inbound target=ask authz ctx=side:in
route shop/cart cart
rule match=prefix:/out use=one
rule match=prefix:/blind use=blind
rule match=prefix:/away use=one redirect=host=other.example
rule match=prefix:/cors use=one cors=https://a.example
`, "PORT", fmt.Sprint(port)))

	gRPC := []string{"Content-Type", "application/grpc"}
	for _, tt := range []struct {
		service, method, path string
		body                  int
		fields                []string
		status                int
		has                   string   // in the answer's body
		answer                []string // its fields
		asked                 int      // questions about this path
	}{
		{"cart", "GET", "/out/ok", 0, nil, 200, "GET /out/ok body=0", nil, 1},
		{"cart", "GET", "/out/empty", 0, nil, 200, "", nil, 1},
		{"cart", "POST", "/out/ok/2", 1000, nil, 200, "body=1000", nil, 1},
		{"cart", "POST", "/out/ok/3", 64 << 10, nil, 200, "body=65536", nil, 1},
		{"cart", "POST", "/out/ok/4", 64<<10 + 1, nil, 200, "body=65537", nil, 1},
		{"cart", "POST", "/out/ok/5", 3 << 20, nil, 200, "body=3145728", nil, 1},
		{"cart", "POST", "/out/ok/6", 100, []string{"Expect", "100-continue"}, 200, `body=100 `, nil, 1},
		{"cart", "POST", "/blind/ok/7", 1000, nil, 200, "body=1000", nil, 1},
		{"cart", "GET", "/out/deny", 0, nil, 403, "", nil, 1},
		{"cart", "POST", "/out/deny/2", 64 << 10, nil, 403, "", nil, 1},
		{"cart", "GET", "/out/bare", 0, nil, 403, "", nil, 1},
		{"cart", "GET", "/out/teapot", 0, nil, 418, "short and stout", []string{"Location", "/login", "Content-Type", "text/tea", "X-Aether-Outcome", "", "Set-Cookie", "a=1|b=2"}, 1},
		{"cart", "GET", "/cors/shared", 0, []string{"Origin", "https://a.example"}, 403, "",
			[]string{"Access-Control-Allow-Origin", "https://a.example", "Access-Control-Allow-Credentials", "", "Vary", "Origin"}, 1},
		{"cart", "GET", "/cors/shared/2", 0, []string{"Origin", "https://b.example"}, 403, "", []string{"Access-Control-Allow-Origin", "", "Vary", "Origin"}, 1},
		{"cart", "POST", "/out/login", 0, gRPC, 200, "", []string{"Grpc-Status", "16", "Grpc-Message", "who are you?"}, 1},
		{"cart", "GET", "/out/edit?gone=1&q=z", 0, []string{"X-Gone", "1", "X-Add", "1"}, 200,
			`GET /out/edit?q=a%20b body=0 0 x-who=alice x-add=["1" "2"] x-gone="" expect="" xfcc=true`, []string{"X-App", "judge", "X-Both", "app|judge", "X-Aether-Outcome", ""}, 1},
		{"cart", "GET", "/out/broken", 0, nil, 403, "no answer that can be read", nil, 1},
		{"cart", "GET", "/out/many", 0, nil, 403, "no answer that can be read", nil, 1},
		{"cart", "GET", "/out/big", 0, nil, 403, "no answer that can be read", nil, 1},
		{"cart", "GET", "/out/error", 0, nil, 403, "could not judge", nil, 1},
		{"cart", "GET", "/out/rpc", 0, nil, 403, "no answer that can be read", nil, 1},
		// All filters of a service; the second sees what the first changed, and nobody is asked after a no.
		{"two", "GET", "/both/second", 0, nil, 403, "the second says no", nil, 2},
		{"two", "GET", "/both/ok", 0, nil, 200, "", nil, 2},
		{"two", "GET", "/both/deny", 0, nil, 403, "", nil, 1},
		{"two", "GET", "/both/%6fk", 0, nil, 200, "", nil, 2}, // and as often about the other spelling
		// What the proxy itself answers is asked about first.
		{"cart", "GET", "/away/ok", 0, nil, 302, "", []string{"Location", "http://other.example:PORT/away/ok"}, 1},
		{"cart", "GET", "/away/deny", 0, nil, 403, "", []string{"Location", ""}, 1},
		{"cart", "GET", "/away/edit", 0, nil, 302, "", []string{"X-App", "judge"}, 1},
		// Two spellings, of which the second is refused.
		{"cart", "GET", "/out/%73pelled", 0, nil, 403, "not there", nil, 1},
		{"cart", "GET", "/out/%6fk", 0, nil, 200, "/out/%6fk", nil, 1},
		// At the destination.
		{"ask", "GET", "/in/ok", 0, nil, 200, "GET /in/ok body=0", nil, 1},
		{"ask", "POST", "/in/ok/2", 70000, nil, 200, "body=70000", nil, 1},
		{"ask", "GET", "/in/teapot", 0, nil, 418, "short and stout", []string{"Location", "/login", "X-Aether-Outcome", "", "Set-Cookie", "a=1|b=2"}, 1},
		{"ask", "POST", "/in/login", 10, gRPC, 200, "", []string{"Grpc-Status", "16"}, 1},
		{"ask", "GET", "/in/edit?gone=1&q=z", 0, []string{"X-Gone", "1", "X-Add", "1"}, 200,
			`GET /in/edit?q=a%20b body=0 0 x-who=alice x-add=["1" "2"] x-gone="" expect="" xfcc=true`, []string{"X-App", "judge", "X-Both", "app|judge", "X-Aether-Outcome", ""}, 1},
		{"ask", "GET", "/in/rpc", 0, nil, 403, "", nil, 1},
		{"ask", "GET", "/in/%73pelled", 0, nil, 403, "not there", nil, 1},
	} {
		t.Run(fmt.Sprintf("%s %s %d", tt.method, tt.path, tt.body), func(t *testing.T) {
			body := make([]byte, tt.body)
			for k := range body {
				body[k] = byte(k*7 + k>>8)
			}
			var in io.Reader
			if tt.body > 0 {
				in = strings.NewReader(string(body))
			}
			got, text, h, err := ask(t.Context(), at, tt.method, fmt.Sprintf("%s.shop.aether.internal:%d", tt.service, port), tt.path, in, tt.fields...)
			if err != nil || got != tt.status || !strings.Contains(text, tt.has) {
				t.Fatalf("%d %q, %v; want %d and %q", got, text, err, tt.status, tt.has)
			}
			if tt.status == 200 && tt.body > 0 && h.Get("Grpc-Status") == "" && !strings.Contains(text, fmt.Sprintf("body=%d %x ", tt.body, sum(body))) && tt.has != "" {
				t.Errorf("another body: %q", text)
			}
			for i := 0; i < len(tt.answer); i += 2 {
				want := strings.ReplaceAll(tt.answer[i+1], "PORT", fmt.Sprint(port))
				if v := strings.Join(h.Values(tt.answer[i]), "|"); v != want {
					t.Errorf("%s: %q, want %q", tt.answer[i], v, want)
				}
			}
			path, _, _ := strings.Cut(tt.path, "?")
			qs := slices.DeleteFunc(j.of(path), func(q *authv3.AttributeContext) bool {
				p, _, _ := strings.Cut(q.Request.Http.Path, "?")
				return p != path
			})
			if len(qs) != tt.asked {
				t.Errorf("asked %d times, want %d", len(qs), tt.asked)
				return
			}
			q := qs[0]
			whole := map[bool]string{true: "false", false: "true"}[tt.body <= 64<<10]
			if tt.service != "ask" && !strings.HasPrefix(tt.path, "/blind") && (q.Request.Http.Headers["x-envoy-auth-partial-body"] != whole || q.Request.Http.Body != clean(body[:min(len(body), 64<<10)])) {
				t.Errorf("asked with a body of %d bytes, partial %s", len(q.Request.Http.Body), q.Request.Http.Headers["x-envoy-auth-partial-body"])
			}
			if strings.HasPrefix(tt.path, "/blind") && q.Request.Http.Body != "" {
				t.Error("asked with a body, which the filter does not want")
			}
			if q.Request.Http.Id == "" || q.Request.Http.Id != q.Request.Http.Headers["x-request-id"] {
				t.Errorf("the request has no id: %q", q.Request.Http.Id)
			}
			if tt.service == "ask" {
				if q.Source.Principal != "spiffe://td/ns/shop/sa/web" || q.Destination.Principal == "" || q.ContextExtensions["side"] != "in" || !strings.Contains(q.Request.Http.Headers["x-forwarded-client-cert"], "spiffe://td/ns/shop/sa/web") {
					t.Errorf("asked about %v", q)
				}
				from := "127.0.0.1" // of the hop's connection
				if inProcess {
					from = "127.1.0.9" // of the pod
				}
				if q.Source.Address.GetSocketAddress().GetAddress() != from {
					t.Errorf("from %v", q.Source)
				}
			} else if m := q.MetadataContext.FilterMetadata["aether.source"].GetFields(); m["pod"].GetStringValue() == "" || m["namespace"].GetStringValue() != "shop" {
				t.Errorf("nothing says who asks: %v", q.MetadataContext)
			}
		})
	}
	// The source does not ask elsewhere for what was refused.
	for path, want := range map[string]string{"/in/deny/outcome": "0;UAEX;GET;ext_authz_denied", "/in/rpc/outcome": "0;UAEX;GET;ext_authz_error"} {
		if _, _, _, err := ask(t.Context(), at, "GET", fmt.Sprintf("ask.shop.aether.internal:%d", port), path, nil); err != nil {
			t.Fatal(err)
		}
		for e := range w.journal.ch {
			if e.Dir == model.Inbound && e.Path.String() == path {
				if e.Outcome.String() != want || e.Flags != journal.UAEX || e.Status != 403 {
					t.Errorf("%s: outcome %s, flags %s, status %d; want %s", path, &e.Outcome, e.Flags, e.Status, want)
				}
				break
			}
		}
	}
	for i, name := range extauthz.Results {
		if want := map[string]bool{"allowed": true, "denied": true, "error": true}[name]; want != (service.Asked[i].Value() > 0) {
			t.Errorf("%s: %d", name, service.Asked[i].Value())
		}
	}
}

// clean is b as a question has it.
func clean(b []byte) string {
	var out strings.Builder
	for i, r := range string(b) {
		if r == 0xfffd && !strings.HasPrefix(string(b[i:min(i+3, len(b))]), "\uFFFD") {
			out.WriteByte('!')
			continue
		}
		out.WriteRune(r)
	}
	return out.String()
}

// TestAuthzOutage: without the service nothing passes, and once it is there everything does that it allows.
func TestAuthzOutage(t *testing.T) {
	dir := t.TempDir()
	service, with := asking(t, "unix://"+filepath.Join(dir, "authz.sock"), time.Minute)
	w := newTown(t, with)
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("cart1", "cart", "cart", "127.1.0.1")
	port := w.echo()
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(strings.ReplaceAll(`
service shop/cart 127.0.0.2
pods shop/cart PORT ip=127.1.0.1
local shop/web cid=web
local shop/cart PORT cid=cart1
filter shop/ask authz scope=chain target=cart
`, "PORT", fmt.Sprint(port)))
	host := fmt.Sprintf("cart.shop.aether.internal:%d", port)
	got, text, _, err := ask(t.Context(), at, "POST", host, "/", strings.NewReader("body"))
	if err != nil || got != 403 || !strings.Contains(text, "ext-authz-unavailable") {
		t.Fatalf("nobody listens: %d %q, %v", got, text, err)
	}
	e := <-w.journal.ch
	if e.Action != "refuse" || e.Cause != extauthz.CauseUnavailable {
		t.Errorf("recorded as %s", e.String())
	}
	if n := service.Asked[slices.Index(extauthz.Results[:], "unreachable")].Value(); n != 1 {
		t.Errorf("counted %d times", n)
	}
	j := &judge{judge: func(context.Context, *authv3.AttributeContext) (*authv3.CheckResponse, error) {
		return &authv3.CheckResponse{Status: ok()}, nil
	}}
	j.serve(t, dir)
	for began := time.Now(); time.Since(began) < 30*time.Second; { // grpc-go tries to connect by itself
		if got, _, _, err = ask(t.Context(), at, "POST", host, "/", strings.NewReader("body")); err != nil {
			t.Fatal(err)
		}
		if got == 200 {
			return
		}
	}
	t.Errorf("the service is there, and the answer still %d", got)
}

// TestAuthzTimeout: a service that does not answer in 200 ms has not said yes (contract 10.7).
func TestAuthzTimeout(t *testing.T) {
	j := &judge{judge: func(ctx context.Context, _ *authv3.AttributeContext) (*authv3.CheckResponse, error) {
		<-ctx.Done()
		return nil, ctx.Err()
	}}
	service, with := asking(t, j.serve(t, t.TempDir()), 0)
	w := newTown(t, with)
	web := w.pod("web", "web", "web", "127.1.0.9")
	w.pod("in1", "in", "in", "127.1.0.1")
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(`
service shop/out 127.0.0.2
pods shop/out 8080 ip=127.1.0.2
service shop/in 127.0.0.3
pods shop/in 8080 ip=127.1.0.1
local shop/web cid=web
local shop/in 8080 cid=in1
filter shop/ask authz scope=chain target=out
filter shop/ask-in authz scope=inbound target=in
`)
	for i, tt := range []struct{ service, kind, want string }{
		{"out", "text/plain", "403 "}, {"in", "text/plain", "403 "}, {"out", "application/grpc", "200 7"}, {"in", "application/grpc+proto", "200 7"},
	} {
		began := time.Now()
		status, text, h, err := ask(t.Context(), at, "POST", tt.service+".shop.aether.internal:8080", "/", strings.NewReader("body"), "Content-Type", tt.kind)
		if got := fmt.Sprint(status, " ", h.Get("Grpc-Status")); err != nil || got != tt.want || !strings.Contains(text+h.Get("Grpc-Message"), "ext-authz-unavailable: HTTPFilter shop/ask") {
			t.Errorf("%s %s: %s %q, %v; want %s", tt.service, tt.kind, got, text, err, tt.want)
		}
		if took := time.Since(began); took < extauthz.DefaultTimeout {
			t.Errorf("%s: given up after %v", tt.service, took)
		}
		// Under a load that keeps even the connect from being made in time it is a timeout, too.
		if n := service.Asked[slices.Index(extauthz.Results[:], "timeout")].Value(); n != uint64(i+1) {
			t.Errorf("counted %d times, want %d", n, i+1)
		}
	}
}

// TestAuthzClientLeaves: one that goes while its request is asked about ends the question, and nothing is forwarded.
func TestAuthzClientLeaves(t *testing.T) {
	asked, ended := make(chan struct{}), make(chan struct{})
	j := &judge{judge: func(ctx context.Context, _ *authv3.AttributeContext) (*authv3.CheckResponse, error) {
		close(asked)
		<-ctx.Done()
		close(ended)
		return &authv3.CheckResponse{Status: ok()}, nil
	}}
	service, with := asking(t, j.serve(t, t.TempDir()), time.Hour)
	w := newTown(t, with)
	web := w.pod("web", "web", "web", "127.1.0.9")
	at := w.listen(web.Engine, "127.0.0.1:0", w.out.AcceptProxy(web))
	w.apply(`
service shop/cart 127.0.0.2
pods shop/cart 8080 ip=127.1.0.1
local shop/web cid=web
filter shop/ask authz scope=chain target=cart
`)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		<-asked
		cancel()
	}()
	if _, _, _, err := ask(ctx, at, "GET", "cart.shop.aether.internal:8080", "/", nil); err == nil {
		t.Error("answered")
	}
	e := <-w.journal.ch
	if e.Ended != "client" || e.Attempts != 0 {
		t.Errorf("recorded as %s", e.String())
	}
	<-ended
	if n := service.Asked[slices.Index(extauthz.Results[:], "cancelled")].Value(); n != 1 {
		t.Errorf("counted %d times", n)
	}
}
