// Package gamma says what Kubernetes objects mean to the mesh: Services, the Gateway
// API's routes and grants, and the objects of config.aether.io. It is the one
// definition for objects in files (controlplane/file) and on an API server
// (controlplane/kube).
//
//   - Pure: objects in, model values and problems out.
//   - Fail closed: what is refused of a route stays as rules that answer 500 to
//     the requests that pick them; a refused HTTPFilter stays, marked, and refuses
//     what it governs.
//   - One object at a time: what depends on others (permission to name a Service of
//     another namespace, the numbers of named ports) is a second step, taken again when
//     the others change. State takes both for the objects of an API server.
//
// The package is also the Go form of the API group config.aether.io/v1.
//
// +groupName=config.aether.io
// +versionName=v1
package gamma
