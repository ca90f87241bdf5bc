package apiserver

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/rest"
)

// Role is what an account may do, and what it has done by the client that it was given.
type Role struct {
	allowed []string
	mu      sync.Mutex
	used    map[string]bool
}

// WithRoles makes an account that may do what the ClusterRoles and Roles of a YAML file
// say, Roles in namespace, and gives a client's configuration as it. Every object is
// given a name of its own, so that tests do not meet.
func (s *Server) WithRoles(t testing.TB, namespace, file string) (*rest.Config, *Role) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	account := fmt.Sprintf("role-%d", namespaces.Add(1))
	s.Account(t, namespace, account)
	subject := []rbacv1.Subject{{Kind: "ServiceAccount", Namespace: namespace, Name: account}}
	api := s.Client(t).RbacV1()
	out := &Role{used: map[string]bool{}}
	for d := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(b), 4096); ; {
		var role rbacv1.ClusterRole // a Role has the same fields
		if err := d.Decode(&role); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		name := metav1.ObjectMeta{Name: account}
		ref := rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: role.Kind, Name: account}
		var err, berr error
		switch role.Kind {
		case "ClusterRole":
			_, err = api.ClusterRoles().Create(t.Context(), &rbacv1.ClusterRole{ObjectMeta: name, Rules: role.Rules}, metav1.CreateOptions{})
			_, berr = api.ClusterRoleBindings().Create(t.Context(), &rbacv1.ClusterRoleBinding{ObjectMeta: name, RoleRef: ref, Subjects: subject}, metav1.CreateOptions{})
		case "Role":
			_, err = api.Roles(namespace).Create(t.Context(), &rbacv1.Role{ObjectMeta: name, Rules: role.Rules}, metav1.CreateOptions{})
			_, berr = api.RoleBindings(namespace).Create(t.Context(), &rbacv1.RoleBinding{ObjectMeta: name, RoleRef: ref, Subjects: subject}, metav1.CreateOptions{})
		default:
			t.Fatalf("%s: kind %q is no role", file, role.Kind)
		}
		if err := errors.Join(err, berr); err != nil {
			t.Fatal(err)
		}
		for _, r := range role.Rules {
			for _, resource := range r.Resources {
				for _, verb := range r.Verbs {
					out.allowed = append(out.allowed, verb+" "+resource)
				}
			}
		}
	}
	c := s.As(t, namespace, account)
	c.Wrap(func(next http.RoundTripper) http.RoundTripper { return recorder{out, next} })
	return c, out
}

// Check fails the test if something that the role allows has not been done. Whoever
// watches may list: a server that cannot stream a listing is asked for one.
func (r *Role) Check(t testing.TB) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range r.allowed {
		verb, resource, _ := strings.Cut(a, " ")
		if !r.used[a] && !(verb == "list" && r.used["watch "+resource]) {
			t.Errorf("the role allows to %s, which nothing does", a)
		}
	}
	for u := range r.used {
		if !slices.Contains(r.allowed, u) {
			t.Errorf("%s is tried, which the role does not allow", u)
		}
	}
}

// recorder notes what is asked for.
type recorder struct {
	role *Role
	next http.RoundTripper
}

// RoundTrip is an http.RoundTripper's.
func (r recorder) RoundTrip(q *http.Request) (*http.Response, error) {
	if a := action(q); a != "" {
		r.role.mu.Lock()
		r.role.used[a] = true
		r.role.mu.Unlock()
	}
	return r.next.RoundTrip(q)
}

// action is a request in the words of a role: "list pods".
func action(q *http.Request) string {
	p := strings.Split(strings.Trim(q.URL.Path, "/"), "/")
	switch { // /api/v1/... or /apis/group/version/...
	case len(p) > 2 && p[0] == "api":
		p = p[2:]
	case len(p) > 3 && p[0] == "apis":
		p = p[3:]
	default:
		return ""
	}
	if len(p) > 2 && p[0] == "namespaces" {
		p = p[2:]
	}
	resource := p[0]
	if len(p) > 2 {
		resource += "/" + p[2]
	}
	switch q.Method {
	case http.MethodGet:
		switch {
		case len(p) > 1:
			return "get " + resource
		case q.URL.Query().Get("watch") != "":
			return "watch " + resource
		}
		return "list " + resource
	case http.MethodPost:
		return "create " + resource
	case http.MethodPut:
		return "update " + resource
	case http.MethodPatch:
		return "patch " + resource
	case http.MethodDelete:
		return "delete " + resource
	}
	return q.Method + " " + resource
}
