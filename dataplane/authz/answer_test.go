//lint:file-ignore SA1019 services say append by the deprecated field, and mean it

package authz_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	authv3 "github.com/envoyproxy/go-control-plane/envoy/service/auth/v3"
	typev3 "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	rpcstatus "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"aether/dataplane/authz"
	"aether/dataplane/model"
	"aether/dataplane/snapshot"
)

// notTheirs reports whether a field is none that a service may change (contract 5.7, 5.9, 5.10).
func notTheirs(name string) bool {
	dashed := strings.ReplaceAll(name, "_", "-")
	return strings.HasPrefix(name, ":") || strings.HasPrefix(dashed, "x-aether-") ||
		slices.Contains([]string{"host", "connection", "keep-alive", "proxy-connection", "transfer-encoding", "content-length", "upgrade", "te",
			"trailer", "expect", "x-forwarded-client-cert", "x-envoy-auth-partial-body"}, dashed)
}

// said is an answer in words, made of Envoy's own type: what Parse is compared with.
func said(r *authv3.CheckResponse) string {
	var b strings.Builder
	option := func(side string, o *corev3.HeaderValueOption) {
		name := strings.ToLower(o.GetHeader().GetKey())
		if notTheirs(name) {
			return
		}
		how := "set"
		switch {
		case o.GetAppend().GetValue():
			how = "append"
		case o.AppendAction == corev3.HeaderValueOption_ADD_IF_ABSENT:
			how = "absent"
		case o.AppendAction == corev3.HeaderValueOption_OVERWRITE_IF_EXISTS:
			how = "replace"
		}
		value := o.GetHeader().GetValue()
		if raw := o.GetHeader().GetRawValue(); len(raw) > 0 {
			value = string(raw)
		}
		value = strings.Trim(value, " \t")
		fmt.Fprintf(&b, " %s %s %s=%q", side, how, name, value)
	}
	if r.GetStatus().GetCode() != 0 {
		d := r.GetDeniedResponse()
		status := int(d.GetStatus().GetCode())
		if status < 200 || status > 599 {
			status = 0
		}
		fmt.Fprintf(&b, "denied %d %q", status, d.GetBody())
		for _, o := range d.GetHeaders() {
			option("answer", o)
		}
		return b.String()
	}
	b.WriteString("allowed")
	o := r.GetOkResponse()
	for _, h := range o.GetHeaders() {
		option("request", h)
	}
	for _, name := range o.GetHeadersToRemove() {
		if name = strings.ToLower(name); !notTheirs(name) {
			fmt.Fprintf(&b, " request remove %s=%q", name, "")
		}
	}
	for _, q := range o.GetQueryParametersToSet() {
		fmt.Fprintf(&b, " query set %s=%q", q.Key, q.Value)
	}
	for _, name := range o.GetQueryParametersToRemove() {
		fmt.Fprintf(&b, " query remove %s=%q", name, "")
	}
	for _, h := range o.GetResponseHeadersToAdd() {
		option("answer", h)
	}
	return b.String()
}

func read(a authz.Answer) string {
	var b strings.Builder
	if a.Allowed {
		b.WriteString("allowed")
	} else {
		fmt.Fprintf(&b, "denied %d %q", a.Status, a.Body)
	}
	ops := func(side string, list []snapshot.Op) {
		for _, o := range list {
			how := map[model.MutationKind]string{model.OverwriteIfExistsOrAdd: "set", model.AppendIfExistsOrAdd: "append", model.AddIfAbsent: "absent", model.OverwriteIfExists: "replace", model.RemoveAll: "remove"}[o.Kind]
			fmt.Fprintf(&b, " %s %s %s=%q", side, how, o.Name, o.Value)
		}
	}
	ops("request", a.Request)
	ops("query", a.Query)
	ops("answer", a.Response)
	return b.String()
}

func randomAnswer(r *rand.Rand) *authv3.CheckResponse {
	names := []string{"X-A", "x-b", ":path", "Host", "x-aether-pod", "X-Forwarded-Client-Cert", "content-length", "set-cookie"}
	option := func() *corev3.HeaderValueOption {
		o := &corev3.HeaderValueOption{Header: &corev3.HeaderValue{Key: names[r.IntN(len(names))]}, AppendAction: corev3.HeaderValueOption_HeaderAppendAction(r.IntN(4))}
		if r.IntN(2) == 0 {
			o.Header.Value = strings.Repeat("v", r.IntN(200))
		} else {
			o.Header.RawValue = []byte{'r', 0xff}[:r.IntN(3)]
		}
		switch r.IntN(3) {
		case 0:
			o.Append = wrapperspb.Bool(true)
		case 1:
			o.Append = wrapperspb.Bool(false)
		}
		o.KeepEmptyValue = r.IntN(2) == 0
		return o
	}
	options := func() (out []*corev3.HeaderValueOption) {
		for range r.IntN(4) {
			out = append(out, option())
		}
		return out
	}
	a := &authv3.CheckResponse{}
	if r.IntN(4) > 0 {
		a.Status = &rpcstatus.Status{Code: int32(r.IntN(3) * 7), Message: "text"}
	}
	if r.IntN(2) == 0 {
		a.DynamicMetadata = &structpb.Struct{Fields: map[string]*structpb.Value{"k": structpb.NewNumberValue(1)}}
	}
	switch r.IntN(3) {
	case 0:
		a.HttpResponse = &authv3.CheckResponse_DeniedResponse{DeniedResponse: &authv3.DeniedHttpResponse{
			Status: &typev3.HttpStatus{Code: typev3.StatusCode([]int{0, 100, 200, 302, 401, 403, 511}[r.IntN(7)])}, Body: strings.Repeat("b", r.IntN(300)), Headers: options()}}
	case 1:
		o := &authv3.OkHttpResponse{Headers: options(), ResponseHeadersToAdd: options()}
		for range r.IntN(3) {
			o.HeadersToRemove = append(o.HeadersToRemove, []string{"X-C", "host", "x-aether-ip"}[r.IntN(3)])
			o.QueryParametersToSet = append(o.QueryParametersToSet, &corev3.QueryParameter{Key: "k", Value: "v w"})
			o.QueryParametersToRemove = append(o.QueryParametersToRemove, "gone")
		}
		a.HttpResponse = &authv3.CheckResponse_OkResponse{OkResponse: o}
	}
	return a
}

// TestParse: answers that Envoy's own types wrote are read as what they say.
func TestParse(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	kinds := map[bool]int{}
	for range 5000 {
		in := randomAnswer(r)
		b, err := proto.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		a, err := authz.Parse(b)
		if err != nil {
			t.Fatalf("%v: %v", in, err)
		}
		if got, want := read(a), said(in); got != want {
			t.Fatalf("%v\n got %s\nwant %s", in, got, want)
		}
		kinds[a.Allowed]++
		if len(b) > 0 {
			if _, err := authz.Parse(slices.Concat(b, []byte{0x1a, 0x05, 1})); err == nil {
				t.Fatal("a message that breaks off is taken")
			}
		}
	}
	if kinds[true] < 500 || kinds[false] < 500 {
		t.Error("not of both kinds:", kinds)
	}
}

// odd are answers that no service means, each with what they were made of.
func odd() map[string][]byte {
	tag := func(num protowire.Number, kind protowire.Type, rest ...byte) []byte {
		return append(protowire.AppendTag(nil, num, kind), rest...)
	}
	of := func(num protowire.Number, parts ...[]byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, num, protowire.BytesType), slices.Concat(parts...))
	}
	number := func(num protowire.Number, n uint64) []byte {
		return protowire.AppendVarint(protowire.AppendTag(nil, num, protowire.VarintType), n)
	}
	name := of(1, []byte("x-a"))
	return map[string][]byte{
		"a code, then one as bytes":         of(1, number(1, 6176), of(1)),
		"a code as bytes":                   of(1, of(1, []byte{7})),
		"a code as fixed32":                 of(1, tag(1, protowire.Fixed32Type, 7, 0, 0, 0)),
		"a code as fixed64":                 of(1, tag(1, protowire.Fixed64Type, 7, 0, 0, 0, 0, 0, 0, 0)),
		"a code as a group":                 of(1, tag(1, protowire.StartGroupType), tag(1, protowire.EndGroupType)),
		"a code of more than 32 bits":       of(1, number(1, 1<<32)),
		"a negative code":                   of(1, number(1, 1<<64-1)),
		"a status as a number":              number(1, 7),
		"two statuses":                      slices.Concat(of(1, number(1, 7)), of(1)),
		"two statuses, the second OK":       slices.Concat(of(1, number(1, 7)), of(1, number(1, 0))),
		"a status' text is not UTF-8":       of(1, number(1, 7), of(2, []byte{0xff})),
		"a detail as a number":              of(1, number(1, 7), number(3, 1)),
		"a denial as a number":              slices.Concat(of(1, number(1, 7)), number(2, 1)),
		"a denial in two parts":             slices.Concat(of(1, number(1, 7)), of(2, of(1, number(1, 401))), of(2, of(3, []byte("no")))),
		"a denial, an approval, a denial":   slices.Concat(of(1, number(1, 7)), of(2, of(1, number(1, 401))), of(3), of(2, of(3, []byte("no")))),
		"an error, then an approval":        slices.Concat(of(5), of(3)),
		"an approval, then an error":        slices.Concat(of(3), of(5)),
		"a denial's status twice":           slices.Concat(of(1, number(1, 7)), of(2, of(1, number(1, 401), number(1, 7)))),
		"a denial's body is not UTF-8":      slices.Concat(of(1, number(1, 7)), of(2, of(3, []byte{0xff}))),
		"an approval in two parts":          slices.Concat(of(3, of(5, []byte("a"))), of(3, of(5, []byte("b")))),
		"a value that is not UTF-8":         of(3, of(2, of(1, name, of(2, []byte{0xff})))),
		"a raw value that is not UTF-8":     of(3, of(2, of(1, name, of(3, []byte{0xff})))),
		"a raw value, then a value":         of(3, of(2, of(1, name, of(3, []byte("raw")), of(2, []byte("text"))))),
		"a name as a number":                of(3, of(2, of(1, number(1, 7)))),
		"append as a number":                of(3, of(2, of(1, name), number(2, 1))),
		"append, then an unknown field":     of(3, of(2, of(1, name), of(2, number(1, 1), number(9, 0)))),
		"append of two bits":                of(3, of(2, of(1, name), of(2, number(1, 2)))),
		"an action of more than 32 bits":    of(3, of(2, of(1, name), number(3, 1<<32|1))),
		"metadata with a wrong value":       of(4, of(1, of(1, []byte("k")), of(2, number(2, 1)))),
		"metadata of an approval is broken": of(3, of(3, []byte{0xff})),
		"a query removed, then set":         of(3, of(8, []byte("a")), of(7, of(1, []byte("a")), of(2, []byte("b")))),
		"a field removed, then set":         of(3, of(5, []byte("x-a")), of(2, of(1, name, of(2, []byte("b"))))),
		"an unknown field, broken":          tag(100, protowire.BytesType, 5, 1),
		"an unknown group":                  slices.Concat(tag(100, protowire.StartGroupType), number(1, 1), tag(100, protowire.EndGroupType)),
		"the end of a group":                tag(100, protowire.EndGroupType),
	}
}

// agrees holds Parse against protobuf's own reader of Envoy's own type: what that
// refuses is refused, and what both take is the same answer. Parse may refuse more.
func agrees(t *testing.T, b []byte) {
	t.Helper()
	a, err := authz.Parse(b)
	if err != nil {
		if a.Allowed {
			t.Error("allowed by what is no answer")
		}
		return
	}
	var m authv3.CheckResponse
	switch err := proto.Unmarshal(b, &m); {
	case err != nil:
		t.Fatalf("%s, and protobuf has it: %v", read(a), err)
	case m.GetErrorResponse() != nil:
		t.Fatalf("%s, and the service could not judge", read(a))
	case read(a) != said(&m):
		t.Fatalf("got %s\nwant %s", read(a), said(&m))
	}
}

// TestParseOdd: an answer that protobuf reads as a denial is never an approval here,
// however it is written. Answers of which a field is of another kind than its number
// has are none at all.
func TestParseOdd(t *testing.T) {
	taken := map[string]bool{
		"a negative code": true, "two statuses": true, "two statuses, the second OK": true, "a denial in two parts": true, "a denial, an approval, a denial": true,
		"an error, then an approval": true, "a denial's status twice": true, "an approval in two parts": true, "a raw value, then a value": true, "a raw value that is not UTF-8": true,
		"append, then an unknown field": true, "append of two bits": true, "an unknown group": true, "a query removed, then set": true, "a field removed, then set": true,
	}
	for what, b := range odd() {
		t.Run(what, func(t *testing.T) {
			if _, err := authz.Parse(b); (err == nil) != taken[what] {
				t.Errorf("%v, want it taken: %v", err, taken[what])
			}
			agrees(t, b)
		})
	}
}

// TestParseDepth: messages may stand inside each other so deep, and no deeper.
func TestParseDepth(t *testing.T) {
	in := func(num protowire.Number, b []byte) []byte {
		return protowire.AppendBytes(protowire.AppendTag(nil, num, protowire.BytesType), b)
	}
	var value []byte // the answer, its Struct and an entry stand around it, and a list and its value make two
	for range 48 {
		value = in(6, in(1, value))
	}
	if _, err := authz.Parse(in(4, in(1, in(2, value)))); err != nil {
		t.Errorf("%v", err)
	}
	if _, err := authz.Parse(in(4, in(1, in(2, in(6, in(1, value)))))); err == nil {
		t.Error("a message deeper than the bound is taken")
	}
}

// FuzzParse: whatever comes, it is an answer that a proxy can act on and that
// protobuf's own reader takes for the same, or none.
func FuzzParse(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		b, _ := proto.Marshal(randomAnswer(r))
		f.Add(b)
	}
	for _, b := range odd() {
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		agrees(t, b)
		a, err := authz.Parse(b)
		if err != nil {
			return
		}
		if len(a.Request)+len(a.Response)+len(a.Query) > authz.MaxEdits {
			t.Error("more changes than are let through")
		}
		for _, o := range slices.Concat(a.Request, a.Response) {
			if strings.ContainsAny(string(o.Value), "\r\n\x00") || string(o.Name) == "host" || o.Name[0] == ':' || strings.HasPrefix(string(o.Name), "x-aether-") {
				t.Errorf("field %q: %q", o.Name, o.Value)
			}
		}
		if a.Status != 0 && (a.Status < 200 || a.Status > 599) {
			t.Errorf("status %d", a.Status)
		}
	})
}

// TestAnswerIsBounded: an answer of as many bytes as may be is read, one of a byte more is not. What is unknown in it counts.
func TestAnswerIsBounded(t *testing.T) {
	for size, want := range map[int]bool{authz.MaxAnswer: true, authz.MaxAnswer + 1: false} {
		b := protowire.AppendTag(nil, 1000, protowire.BytesType)
		b = protowire.AppendBytes(b, make([]byte, size-len(b)-3)) // its length takes three bytes
		if len(b) != size {
			t.Fatalf("made %d bytes, want %d", len(b), size)
		}
		if _, err := authz.Parse(b); (err == nil || !strings.Contains(err.Error(), "at most")) != want {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
}
