package authz_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	"aether/dataplane/authz"
	"aether/dataplane/decide"
	"aether/dataplane/httpmsg"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

var update = flag.Bool("update", false, "rewrite the messages in testdata")

var (
	pod = &snapshot.Workload{
		Service: model.ServiceName{Namespace: "shop", Name: "web"}, Pod: "web-0", SPIFFEID: "spiffe://td/ns/shop/sa/web",
	}
	when = time.Date(2026, 1, 2, 3, 4, 5, 6000, time.UTC)
)

func question(t testing.TB, flow, request string) *authz.Question {
	t.Helper()
	f, err := model.ParseFlow(flow)
	if err != nil {
		t.Fatal(err)
	}
	h, err := model.ParseRequest(request)
	if err != nil {
		t.Fatal(err)
	}
	return &authz.Question{
		Flow: &f, Head: &h, Workload: pod, ID: "a-request", Time: when,
		Authz:  &snapshot.Authz{Name: "HTTPFilter shop/ask", ContextExtensions: map[string]string{"team": "cart"}},
		Source: netip.MustParseAddrPort("10.244.0.7:40000"), Destination: netip.MustParseAddrPort("10.96.0.1:8080"),
	}
}

// TestGolden compares whole messages, as JSON, with those of testdata.
func TestGolden(t *testing.T) {
	for _, tt := range []struct {
		name, flow, request string
		change              func(q *authz.Question)
	}{
		{"egress", "shop/web > 10.96.0.1:8080 http1", "GET cart:8080/items?x=1 h:version=2 h:accept=a h:accept=b h:x-request-id=a-request", nil},
		{"egress-h2c", "shop/web > 10.96.0.1:8080 h2c", "POST cart:8080/a.B/C h:content-type=application/grpc", func(q *authz.Question) { q.Head.Length = httpmsg.Unknown }},
		{"proxy-http10", "shop/web > proxy http10", "GET /", func(q *authz.Question) {
			q.Head.Minor = 0
			q.Destination = netip.MustParseAddrPort("127.0.0.1:18081")
			q.Authz = &snapshot.Authz{Name: "HTTPFilter shop/ask"}
		}},
		{"ingress", "shop/web < 8080 h2c peer=spiffe://td/ns/pay/sa/till", "GET web:8080/admin", func(q *authz.Question) {
			q.Destination = netip.MustParseAddrPort("[::ffff:10.244.9.1]:18008")
		}},
		{"body", "shop/web > 10.96.0.1:8080 http1", "POST cart/", func(q *authz.Question) {
			q.Head.Length = 5
			q.Body, q.Whole, q.MaxBody = []byte("hello"), true, 5
		}},
		{"body-partial", "shop/web > 10.96.0.1:8080 http1", "POST cart/ h:x-envoy-auth-partial-body=false", func(q *authz.Question) {
			q.Head.Length = 5
			q.Body, q.Whole, q.MaxBody = []byte("hello"), true, 4
		}},
		{"body-excluded", "shop/web > 10.96.0.1:8080 http1", "POST cart/", func(q *authz.Question) {
			q.Head.Length = 5
			q.Body, q.Whole, q.MaxBody, q.Authz.NoBody = []byte("hello"), true, 5, true
		}},
		{"not-utf8", "shop/web > 10.96.0.1:8080 http1", "GET cart/ h:x-latin=1", func(q *authz.Question) {
			q.Head.Fields[0].Value = []byte("caf\xe9 ol\xc3\xa9")
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			q := question(t, tt.flow, tt.request)
			if tt.change != nil {
				tt.change(q)
			}
			golden(t, tt.name, asked(t, q))
		})
	}
}

// TestSecondPath: for a path that may be read as another both are asked about,
// and nothing but the path differs.
func TestSecondPath(t *testing.T) {
	q := question(t, "shop/web > 10.96.0.1:8080 http1", "GET cart/a/.%2F%61dmin?x=%2F")
	first := asked(t, q)
	v := decide.Verdict{Action: decide.Forward, Pipe: &snapshot.FilterChain{Authz: q.Authz}, Respelled: true}
	q.Path = v.AuthzPath(q.Head)
	second := asked(t, q)
	golden(t, "spelled", first)
	golden(t, "spelled-plain", second)
	if a, b := first.Attributes.Request.Http.Path, second.Attributes.Request.Http.Path; a != "/a/.%2F%61dmin?x=%2F" || b != "/a/admin?x=%2F" {
		t.Errorf("asked about %q and %q", a, b)
	}
	second.Attributes.Request.Http.Path = first.Attributes.Request.Http.Path
	second.Attributes.Request.Http.Headers[":path"] = first.Attributes.Request.Http.Path
	if !proto.Equal(first, second) {
		t.Error("more than the path differs")
	}
}

// TestOrder: fields and entries of maps stand in one order, whatever order they came in.
func TestOrder(t *testing.T) {
	q := question(t, "shop/web > 10.96.0.1:8080 http1", "GET cart/ h:b=1 h:a=2 h:c=3")
	q.Authz = &snapshot.Authz{ContextExtensions: map[string]string{}}
	for i := range 40 { // more than are sorted without allocating
		q.Authz.ContextExtensions[fmt.Sprintf("key-%02d", 39-i)] = "v"
	}
	asked(t, q)
	first := authz.Append(nil, q)
	for at, keys := range [][]string{{":authority", ":method", ":path", ":scheme", "a", "b", "c"}, slices.Sorted(maps.Keys(q.Authz.ContextExtensions))} {
		rest := string(first)
		for _, k := range keys {
			_, after, ok := strings.Cut(rest, fmt.Sprintf("\x0a%c%s\x12", len(k), k))
			if !ok {
				t.Errorf("map %d: %q is not there, or not behind the keys before it", at, k)
				break
			}
			rest = after
		}
	}
	slices.Reverse(q.Head.Fields)
	if other := authz.Append(nil, q); !bytes.Equal(other, first) {
		t.Error("fields of other names in another order make other bytes")
	}
}

// TestLengths: every length around which the length of a length changes, at each depth.
func TestLengths(t *testing.T) {
	q := question(t, "shop/web < 8080 http1 peer=spiffe://td/ns/pay/sa/till", "POST web/")
	q.Head.Fields = []httpmsg.Field{{Name: []byte("x-a")}}
	for n := range 700 {
		q.Head.Fields[0].Value = bytes.Repeat([]byte{'v'}, n)
		asked(t, q)
	}
	q.Whole, q.MaxBody = true, authz.MaxBody
	for n := 16384 - 500; n < 16384+50; n++ {
		q.Body = bytes.Repeat([]byte{'b'}, n)
		asked(t, q)
	}
}

// TestBounds: a body is cut and says so, a head is not.
func TestBounds(t *testing.T) {
	q := question(t, "shop/web > 10.96.0.1:8080 http1", "POST cart/")
	q.Body, q.MaxBody = make([]byte, authz.MaxBody+1), 1<<30
	for _, tt := range []struct {
		body    int
		whole   bool
		sent    int
		partial string
	}{
		{0, true, 0, "false"}, {0, false, 0, "true"},
		{authz.MaxBody, true, authz.MaxBody, "false"}, {authz.MaxBody, false, authz.MaxBody, "true"},
		{authz.MaxBody + 1, true, authz.MaxBody, "true"},
	} {
		q.Body, q.Whole = q.Body[:tt.body], tt.whole
		h := asked(t, q).Attributes.Request.Http
		if got := h.Headers["x-envoy-auth-partial-body"]; len(h.Body) != tt.sent || got != tt.partial {
			t.Errorf("a body of %d, whole %t: %d bytes sent, partial %s; want %d and %s", tt.body, tt.whole, len(h.Body), got, tt.sent, tt.partial)
		}
	}
	q.Body = nil
	for i := range authz.MaxFields {
		q.Head.Fields = append(q.Head.Fields, httpmsg.Field{Name: fmt.Appendf(nil, "x-%d", i), Value: []byte("v")})
	}
	if n := len(asked(t, q).Attributes.Request.Http.Headers); n != authz.MaxFields+5 {
		t.Errorf("%d headers of %d fields", n, authz.MaxFields)
	}
	q.Head.Fields = append(q.Head.Fields, httpmsg.Field{Name: []byte("one-more")})
	if m := authz.Append(make([]byte, 5, 1<<16), q); m != nil {
		t.Errorf("a head of %d fields is asked about, with %d bytes", len(q.Head.Fields), len(m))
	}
}

// TestAllocs: with the capacity nothing is allocated, not even for what is not UTF-8.
func TestAllocs(t *testing.T) {
	for _, flow := range []string{"shop/web > 10.96.0.1:8080 http1", "shop/web < 8080 h2c peer=spiffe://td/ns/pay/sa/till"} {
		q := full(t, flow)
		want := authz.Append(nil, q)
		buf := make([]byte, 0, len(want)) // exactly: nothing is written that does not stay
		if n := testing.AllocsPerRun(100, func() { buf = authz.Append(buf[:0], q) }); n != 0 {
			t.Errorf("%s: %v allocations a question, want 0", flow, n)
		}
		if !bytes.Equal(buf, want) {
			t.Errorf("%s: another message", flow)
		}
	}
}

// full is a question with much of everything.
func full(t testing.TB, flow string) *authz.Question {
	q := question(t, flow, "POST cart:8080/items?x=1 h:accept=a h:cookie=a=1 h:accept=b h:user-agent=curl")
	q.Authz = &snapshot.Authz{ContextExtensions: map[string]string{}}
	for i := range 32 {
		q.Authz.ContextExtensions[fmt.Sprint("key-", i)] = "value"
	}
	for i := range authz.MaxFields - len(q.Head.Fields) {
		q.Head.Fields = append(q.Head.Fields, httpmsg.Field{Name: fmt.Appendf(nil, "x-name-%d", i/2), Value: []byte("caf\xe9")})
	}
	q.Head.Fields[9].Name = []byte("x-\xff")
	q.Source = netip.MustParseAddrPort("[2001:db8::1]:40000")
	q.Body, q.Whole, q.MaxBody = bytes.Repeat([]byte("\xe9"), 20000), true, 1<<20
	return q
}

// FuzzAppend: whatever a question holds, its bytes are the message that the oracle
// makes, and within the bound that Append states.
func FuzzAppend(f *testing.F) {
	f.Add("GET", "/a", "", "cart", "http", "x-a:1\nx-a:2\nx-b:3", "team:cart\na:b", "spiffe://td/ns/a/sa/b", "10.0.0.1:80", []byte("body"), 3, uint8(0), int64(0), int64(1), int64(5))
	f.Add("\xff", "\x00", "/\xc3", "\xc3", "", ":path:\xe9\n!:1\n\xff:2\n\xef\xbf\xbd:3\nab:4\na:5\nx-envoy-auth-partial-body:true", "\xff:\xfe\n:", "\xe9", "[fe80::1%\xff]:0", []byte{0xff}, 10, uint8(7), int64(-1), int64(-1<<40), int64(-7))
	f.Add("POST", "", "", "", "", "", "", "", "", []byte(nil), -1, uint8(255), int64(-1<<63), int64(1<<62), int64(1e9))
	f.Fuzz(func(t *testing.T, method, path, second, authority, scheme, fields, extensions, id, peer string, body []byte, most int, flags uint8, length, secs, nanos int64) {
		flow := "shop/web > 10.96.0.1:8080 http1"
		if flags&1 != 0 {
			flow = "shop/web < 8080 h2c peer=spiffe://td/ns/pay/sa/till"
		}
		q := question(t, flow, "GET cart/")
		q.Flow.Peer, q.ID, q.Time = id, id, time.Unix(secs, nanos)
		q.Source, _ = netip.ParseAddrPort(peer)
		q.Workload = &snapshot.Workload{Service: model.ServiceName{Namespace: scheme, Name: authority}, Pod: method, SPIFFEID: id}
		*q.Head = httpmsg.Head{
			Method: []byte(method), Path: []byte(path), Authority: []byte(authority), Scheme: []byte(scheme), Length: length, Minor: flags >> 7,
		}
		for _, line := range strings.Split(fields, "\n") {
			name, value, _ := strings.Cut(line[min(1, len(line)):], ":") // so that a name may begin with a colon
			q.Head.Fields = append(q.Head.Fields, httpmsg.Field{Name: []byte(line[:min(1, len(line))] + name), Value: []byte(value)})
		}
		q.Authz = &snapshot.Authz{NoBody: flags&2 != 0, ContextExtensions: map[string]string{}}
		for _, line := range strings.Split(extensions, "\n") {
			if k, v, ok := strings.Cut(line, ":"); ok && utf8.ValidString(k) { // of two keys that are one in UTF-8 either may win
				q.Authz.ContextExtensions[k] = v
			}
		}
		q.Body, q.MaxBody, q.Whole = body, most, flags&4 != 0
		if flags&8 != 0 {
			q.Path = []byte(second)
		}
		if len(q.Head.Fields) > authz.MaxFields {
			if authz.Append(nil, q) != nil {
				t.Fatalf("a head of %d fields is asked about", len(q.Head.Fields))
			}
			return
		}
		asked(t, q)
		texts := 3*(len(method)+max(len(path), len(second))+len(authority)+len(scheme)+len(id)) + len(fields) + len(extensions) + len(peer) + len(body)
		if n, bound := len(authz.Append(nil, q)), texts+1024+16*(len(q.Head.Fields)+len(q.Authz.ContextExtensions)); n > bound {
			t.Fatalf("%d bytes, more than %d", n, bound)
		}
	})
}

func BenchmarkAppend(b *testing.B) {
	browser := question(b, "shop/web > 10.96.0.1:8080 http1", "GET cart:8080/items?x=1 h:user-agent=curl h:accept=a h:accept-encoding=gzip h:accept-language=en "+
		"h:cookie=a=1 h:x-request-id=a-request h:referer=b h:sec-fetch-mode=cors h:sec-fetch-site=none h:sec-fetch-dest=empty h:cache-control=no-cache h:traceparent=00-1-2-01")
	for name, q := range map[string]*authz.Question{"12-fields": browser, "256-fields-20-kB": full(b, "shop/web > 10.96.0.1:8080 http1")} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			var buf []byte
			for b.Loop() {
				buf = authz.Append(buf[:0], q)
			}
			b.SetBytes(int64(len(buf)))
		})
	}
}

func golden(t *testing.T, name string, m *authv3.CheckRequest) {
	t.Helper()
	if err := m.ValidateAll(); err != nil {
		t.Errorf("%s is not valid: %v", name, err)
	}
	raw, err := protojson.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer // protojson varies its spaces on purpose
	if err := json.Indent(&b, raw, "", "  "); err != nil {
		t.Fatal(err)
	}
	b.WriteByte('\n')
	file := filepath.Join("testdata", name+".json")
	if *update {
		if err := os.WriteFile(file, b.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if got := b.String(); got != string(want) {
		t.Errorf("%s:\n%s\nwant\n%s", name, got, strings.TrimSpace(string(want)))
	}
}
