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

// said is an answer in words, made of Envoy's own type: what Parse is compared with.
func said(r *authv3.CheckResponse) string {
	var b strings.Builder
	option := func(side string, o *corev3.HeaderValueOption) {
		name := strings.ToLower(o.GetHeader().GetKey())
		if name[0] == ':' || name == "host" || name == "content-length" || strings.HasPrefix(name, "x-aether-") || name == "x-forwarded-client-cert" {
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
		fmt.Fprintf(&b, " %s %s %s=%q", side, how, name, value)
	}
	if r.GetStatus().GetCode() != 0 {
		d := r.GetDeniedResponse()
		status := int(d.GetStatus().GetCode())
		if status < 200 {
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
		if name = strings.ToLower(name); name != "host" && !strings.HasPrefix(name, "x-aether-") {
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

// FuzzParse: whatever comes, it is an answer that a proxy can act on, or none.
func FuzzParse(f *testing.F) {
	r := rand.New(rand.NewPCG(3, 4))
	for range 20 {
		b, _ := proto.Marshal(randomAnswer(r))
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		a, err := authz.Parse(b)
		if err != nil {
			if a.Allowed {
				t.Error("allowed by what is no answer")
			}
			return
		}
		var m authv3.CheckResponse
		if err := (proto.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(b, &m); err == nil && a.Allowed != (m.GetStatus().GetCode() == 0) && m.Status != nil {
			t.Errorf("allowed %v, and the status is %d", a.Allowed, m.GetStatus().GetCode())
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
