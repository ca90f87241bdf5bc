package authz_test

import (
	"maps"
	"net/netip"
	"strings"
	"testing"
	"unicode/utf8"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"aether/dataplane/authz"
	"aether/dataplane/model"
)

// oracle is the question made of Envoy's own types: slow, obvious, and by a
// library that knows the field numbers.
func oracle(q *authz.Question) *authv3.CheckRequest {
	a := &authv3.AttributeContext{
		Source:            oraclePeer(q.Source),
		Destination:       oraclePeer(q.Destination),
		Request:           &authv3.AttributeContext_Request{Time: timestamppb.New(q.Time), Http: oracleHTTP(q)},
		ContextExtensions: map[string]string{},
		MetadataContext:   &corev3.Metadata{},
	}
	for k, v := range q.Authz.ContextExtensions {
		a.ContextExtensions[oracleText(k)] = oracleText(v)
	}
	p := q.Workload
	if q.Flow.Dir == model.Inbound {
		a.Source.Principal, a.Destination.Principal = oracleText(q.Flow.Peer), oracleText(p.SPIFFEID)
	} else {
		a.MetadataContext.FilterMetadata = map[string]*structpb.Struct{"aether.source": {Fields: map[string]*structpb.Value{
			"spiffeId":       structpb.NewStringValue(oracleText(p.SPIFFEID)),
			"namespace":      structpb.NewStringValue(oracleText(p.Service.Namespace)),
			"serviceAccount": structpb.NewStringValue(oracleText(p.Service.Name)),
			"pod":            structpb.NewStringValue(oracleText(p.Pod)),
		}}}
	}
	return &authv3.CheckRequest{Attributes: a}
}

func oraclePeer(a netip.AddrPort) *authv3.AttributeContext_Peer {
	if !a.IsValid() {
		return &authv3.AttributeContext_Peer{}
	}
	return &authv3.AttributeContext_Peer{Address: &corev3.Address{Address: &corev3.Address_SocketAddress{SocketAddress: &corev3.SocketAddress{
		Address:       oracleText(a.Addr().Unmap().String()),
		PortSpecifier: &corev3.SocketAddress_PortValue{PortValue: uint32(a.Port())},
	}}}}
}

func oracleHTTP(q *authz.Question) *authv3.AttributeContext_HttpRequest {
	h := q.Head
	path := string(h.Path)
	if q.Path != nil {
		path = string(q.Path)
	}
	r := &authv3.AttributeContext_HttpRequest{
		Id: oracleText(q.ID), Method: oracleText(string(h.Method)), Path: oracleText(path),
		Host: oracleText(string(h.Authority)), Scheme: oracleText(string(h.Scheme)),
		Size: h.Length, Protocol: "HTTP/1.1", Headers: map[string]string{},
	}
	if q.Flow.Sniff == model.SniffH2C {
		r.Protocol = "HTTP/2"
	} else if h.Minor == 0 {
		r.Protocol = "HTTP/1.0"
	}
	lines := map[string][]string{":method": {r.Method}, ":path": {r.Path}, ":authority": {r.Host}, ":scheme": {r.Scheme}}
	maps.DeleteFunc(lines, func(_ string, v []string) bool { return v[0] == "" })
	for _, f := range h.Fields {
		name := oracleText(string(f.Name))
		lines[name] = append(lines[name], oracleText(string(f.Value)))
	}
	delete(lines, "x-envoy-auth-partial-body")
	if q.MaxBody > 0 && !q.Authz.NoBody {
		r.Body = string(q.Body)
		partial := !q.Whole
		if most := min(q.MaxBody, 65536); len(r.Body) > most {
			r.Body, partial = r.Body[:most], true
		}
		r.Body = oracleText(r.Body)
		lines["x-envoy-auth-partial-body"] = []string{map[bool]string{true: "true", false: "false"}[partial]}
	}
	for name, values := range lines {
		r.Headers[name] = strings.Join(values, ",")
	}
	return r
}

// oracleText has a "!" for each byte of s that is not of UTF-8.
func oracleText(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for i, r := range s { // one step of RuneError for each such byte
		if r == utf8.RuneError && !strings.HasPrefix(s[i:], "\uFFFD") {
			r = '!'
		}
		b.WriteRune(r)
	}
	return b.String()
}

// asked is the message that Append writes for q. It checks that the message says
// what the oracle's does, in as few bytes as protobuf has for it, and that neither
// what stood in front of it nor the question has changed.
func asked(t testing.TB, q *authz.Question) *authv3.CheckRequest {
	t.Helper()
	const before = "what stood before"
	want := oracle(q)
	out := authz.Append([]byte(before), q)
	wire, ok := strings.CutPrefix(string(out), before)
	if !ok {
		t.Fatalf("Append changed what stood in front of the message: %q", out[:min(len(out), len(before))])
	}
	got := new(authv3.CheckRequest)
	if err := proto.Unmarshal([]byte(wire), got); err != nil {
		t.Fatalf("what was appended is no CheckRequest: %v\n%x", err, wire)
	}
	if !proto.Equal(got, want) {
		t.Fatalf("got  %s\nwant %s", protojson.Format(got), protojson.Format(want))
	}
	if n := proto.Size(got); n != len(wire) { // a key twice in a map, a length with needless bytes
		t.Errorf("%d bytes for a message of %d", len(wire), n)
	}
	if !proto.Equal(oracle(q), want) {
		t.Errorf("the question changed: it was\n%s\nand is\n%s", protojson.Format(want), protojson.Format(oracle(q)))
	}
	if again := authz.Append(nil, q); string(again) != wire {
		t.Errorf("asked again it is other bytes:\n%x\n%x", wire, again)
	}
	return got
}
